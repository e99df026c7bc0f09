"""Tiny T5s of `transformers` for tests, with weights in which every value counts.

As `tests.support.checkpoints.hf_bert` has them of BERTs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.source import CheckpointSource
from tools.compare_with_transformers import Inputs, Outputs, our_outputs, their_outputs

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

VOCABULARY = 57
# In float32 both sides round a few hundred additions in another order; values are of size 1 to 10.
SAME = 1e-5

# Two layers beside three, heads that together are wider than hidden states, and so few ranges of
# distances that 64 tokens reach the last one.
_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}
CASES: Mapping[str, Mapping[str, Any]] = {
    "1.0": {},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "silu, as deep": {
        "feed_forward_proj": "gated-silu",
        "num_decoder_layers": None,
        "layer_norm_epsilon": 1e-3,
        "tie_word_embeddings": False,
    },
}


def hf_t5(case: str, **changes: Any) -> transformers.T5ForConditionalGeneration:
    """The model of a case in float32, in evaluation mode; the same values every time."""
    config = transformers.T5Config(**(dict(_SHAPE) | dict(CASES[case]) | changes))
    made: Any = transformers.T5ForConditionalGeneration(config)
    if not config.scale_decoder_outputs:  # of 1.1, which this release ties while it builds
        made.lm_head.weight = torch.nn.Parameter(torch.empty(VOCABULARY, config.d_model))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            std = 0.7 if "shared" in name or "bias" in name else 0.1 if "head" in name else 0.3
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
            if parameter.dim() == 1:  # a norm
                parameter.add_(1.0)
    evaluating: transformers.T5ForConditionalGeneration = made.eval()
    return evaluating


def save_t5(case: str, folder: Path, **changes: Any) -> Path:
    """Save the model of a case with transformers' own `save_pretrained`."""
    hf_t5(case, **changes).save_pretrained(folder)
    return folder


def outputs_of(source: CheckpointSource, like: HuggingFaceSource) -> Outputs:
    """What our model computes in float32 from any source of the same weights as `like`."""
    exact = dict.fromkeys(like.tensors, torch.float32)
    return our_outputs(source, Inputs.drawn(like.sizes), like.sizes, exact)


def expected(folder: Path, source: HuggingFaceSource) -> Outputs:
    """What `transformers` computes from the folder."""
    return their_outputs(folder, Inputs.drawn(source.sizes), source.sizes)
