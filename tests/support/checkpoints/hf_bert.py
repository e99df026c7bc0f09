"""Tiny BERTs of `transformers` for tests, with weights in which every value counts.

As `tests.support.checkpoints.hf_models` has them of GPTs. Names of cases say what is unusual in
them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.source import CheckpointSource
from tools.compare_with_transformers import Inputs, Outputs, our_outputs, their_outputs

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

VOCABULARY, POSITIONS = 57, 24
# In float32 both sides round a few hundred additions in another order; values are of size 1 to 10.
SAME = 1e-5

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
}


class Case(NamedTuple):
    """A class of model, and fields of its config."""

    model: str
    fields: Mapping[str, Any]

    @property
    def family(self) -> str:
        """Its `model_type`."""
        return "megatron-bert" if self.model.startswith("Megatron") else "bert"


CASES: Mapping[str, Case] = {
    "bert": Case("BertForPreTraining", {}),
    "bert, masked words": Case("BertForMaskedLM", {"layer_norm_eps": 1e-3}),
    "bert, untied, tanh": Case(
        "BertForPreTraining", {"tie_word_embeddings": False, "hidden_act": "gelu_new"}
    ),
    "bert, bare": Case("BertModel", {"num_hidden_layers": 1}),
    "bert, order alone": Case("BertForNextSentencePrediction", {}),
    "bert, classes": Case("BertForSequenceClassification", {"num_labels": 3}),
    "megatron": Case("MegatronBertForPreTraining", {}),
    "megatron, masked words, untied": Case(
        "MegatronBertForMaskedLM", {"tie_word_embeddings": False}
    ),
    "megatron, bare": Case("MegatronBertModel", {}),
    "megatron, classes": Case("MegatronBertForSequenceClassification", {"num_labels": 2}),
}


def hf_bert(case: str, **changes: Any) -> Any:
    """The model of a case in float32, in evaluation mode; the same values every time."""
    model, fields = CASES[case]
    config = getattr(transformers, model.split("For")[0].removesuffix("Model") + "Config")
    made = getattr(transformers, model)._from_config(
        config(**(_SHAPE | dict(fields) | changes)), attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            std = 0.4 if parameter.dim() == 1 or "embeddings" in name else 0.25
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
            if parameter.dim() == 1 and name.endswith("weight"):  # a norm
                parameter.add_(1.0)
        # Two parameters of the library, of which an untied model computes with one.
        head = getattr(getattr(made, "cls", None), "predictions", None)
        if head is not None:
            head.bias.copy_(head.decoder.bias)
    return made.eval()


def save_bert(case: str, folder: Path, **options: Any) -> Path:
    """Save the model of a case with transformers' own `save_pretrained`."""
    hf_bert(case).save_pretrained(folder, **options)
    return folder


def outputs(source: HuggingFaceSource) -> Outputs:
    """What our model computes from a folder in float32, on padded pairs of segments."""
    exact = dict.fromkeys(source.tensors, torch.float32)
    return our_outputs(source, Inputs.drawn(source.sizes), source.sizes, exact)


def outputs_of(source: CheckpointSource, like: HuggingFaceSource) -> Outputs:
    """What our model computes from any source of the same weights as `like`."""
    exact = dict.fromkeys(like.tensors, torch.float32)
    return our_outputs(source, Inputs.drawn(like.sizes), like.sizes, exact)


def expected(folder: Path, source: HuggingFaceSource) -> Outputs:
    """What `transformers` computes from the folder."""
    return their_outputs(folder, Inputs.drawn(source.sizes), source.sizes)


def apart(found: Outputs, wanted: Outputs) -> float:
    """The largest difference of any output."""
    assert wanted
    return max(float((found[name] - value).abs().max()) for name, value in wanted.items())
