"""Does `transformers` compute from an exported folder what our model computes from its checkpoint?

`check_export` is what the converter calls after it has written a Hugging Face folder; the program
does the same for any pair: `python -m tools.compare_with_transformers --load CHECKPOINT
--huggingface FOLDER`. Both models are built in float32 on the CPU, and so have to fit there twice.
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from megatron import log
from megatron.checkpoint.bert_tensors import BertHeads
from megatron.checkpoint.boxes import whole
from megatron.checkpoint.files.safetensors_io import dtype_of
from megatron.checkpoint.formats import registry
from megatron.checkpoint.formats.huggingface.family import Sizes
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.source import CheckpointSource, SourceOptions
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.model.bert_model import bert_carry, bert_layers, classification_layers
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import LayerSpec, ModelBuild, VocabSize
from megatron.model.stage import PipelineStage, run_layers
from megatron.model.t5_model import T5Model
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams
from megatron.program import run_program

ROWS, LENGTH = 2, 64
# Of the largest logit. float32 over dozens of layers leaves 1e-5; the smallest thing that can be
# wrong with a table of names, one form of GELU for the other, leaves more than this.
TOLERANCE = 1e-4
_SEED = 1234


Outputs = Mapping[str, Tensor]  # what a model computes, by what it is called here


class Inputs(NamedTuple):
    """Rows of tokens, all int64 [b, s]; a BERT has two segments.

    One of the rows of a BERT, and of the encoder of a T5, has padding.
    """

    tokens: Tensor
    types: Tensor
    padding_mask: Tensor

    @classmethod
    def drawn(cls, sizes: Sizes) -> "Inputs":
        """Return random tokens that are the same each time."""
        length = min(LENGTH, sizes.positions)
        generator = torch.Generator().manual_seed(_SEED)
        tokens = torch.randint(0, sizes.vocab_rows, (ROWS, length), generator=generator)
        types, mask = torch.zeros_like(tokens), torch.ones_like(tokens)
        if sizes.heads is not None:
            types[:, length // 2 :] = 1
        if sizes.heads is not None or sizes.decoder is not None:
            mask[-1, length - length // 4 :] = 0
        return cls(tokens, types, mask)

    @property
    def decoder_tokens(self) -> Tensor:
        """The rows of a decoder, which has fewer tokens."""
        return self.tokens.flip(0, 1)[:, : self.tokens.shape[1] // 2 + 1]


class Difference(NamedTuple):
    """One output: its largest value in transformers, and the largest difference."""

    largest: float
    apart: float

    @property
    def is_equal(self) -> bool:
        """Whether the difference is no more than rounding."""
        return self.apart <= TOLERANCE * max(self.largest, 1.0)


@dataclass(frozen=True)
class Comparison:
    """The differences between the outputs of the two."""

    outputs: Mapping[str, Difference]
    tokens: int

    @classmethod
    def of(cls, ours: Outputs, theirs: Outputs, tokens: int) -> "Comparison":
        """Compare the outputs of equal names."""
        outputs = {
            name: Difference(float(value.abs().max()), float((ours[name] - value).abs().max()))
            for name, value in theirs.items()
        }
        return cls(outputs, tokens)

    @property
    def worst(self) -> Difference:
        """The output with the largest relative difference."""
        return max(self.outputs.values(), key=lambda one: one.apart / max(one.largest, 1.0))

    @property
    def is_equal(self) -> bool:
        """Whether no difference is more than rounding."""
        return self.worst.is_equal

    def __str__(self) -> str:
        return (
            f"{', '.join(self.outputs)} of {self.tokens} tokens differ by at most "
            f"{self.worst.apart:.1e} (the largest is {self.worst.largest:.3g})"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags, compare, and print the differences."""
    parser = argparse.ArgumentParser(prog="compare_with_transformers", description=__doc__)
    parser.add_argument("--load", required=True, metavar="FOLDER", help="checkpoint of any format")
    parser.add_argument("--iteration", type=int, help="which one; when not given the latest")
    parser.add_argument("--huggingface", required=True, metavar="FOLDER", help="what was exported")
    args = parser.parse_args(argv)
    with registry.open_source(args.load, args.iteration) as source:
        if check_export(source, Path(args.huggingface)) is None:
            raise ConfigError(
                "there is nothing to compare with",
                found="transformers is not installed",
                fix="pip install transformers",
            )


@torch.no_grad()
def check_export(source: CheckpointSource, folder: Path) -> Comparison | None:
    """Compare the outputs of `source` and of the Hugging Face folder exported from it.

    Of a GPT and a T5 that are logits; of a BERT hidden states, pooled rows and the scores of its
    heads.

    None, with a line in the log, where `transformers` is not installed.

    Raises:
        CheckpointError: they differ by more than rounding.
    """
    if importlib.util.find_spec("transformers") is None:
        log.warning(
            f"the logits of {folder} were not compared with those of this program: transformers is "
            "not installed"
        )
        return None
    with HuggingFaceSource(folder, SourceOptions()) as exported:
        sizes, dtypes = exported.sizes, exported.tensors
        # Rounded as the export rounds, so that what is left is how it is computed.
        rounded = {name: dtype_of(found.dtype_code) for name, found in dtypes.items()}
    inputs = Inputs.drawn(sizes)
    ours = our_outputs(source, inputs, sizes, rounded)
    found = Comparison.of(ours, their_outputs(folder, inputs, sizes), inputs.tokens.numel())
    if not found.is_equal:
        raise CheckpointError(
            "transformers does not compute from the exported folder what this program computes",
            found=f"{folder}: {found}",
            fix="do not use the folder; report this with the config of the run",
        )
    log.info(f"{folder}: {found}: transformers computes the same model")
    return found


@torch.no_grad()
def our_outputs(
    source: CheckpointSource, inputs: Inputs, sizes: Sizes, rounded: Mapping[str, torch.dtype]
) -> Outputs:
    """Return the outputs of our model in float32 from `source`, [b, s, ..] or [b, ..].

    Args:
        rounded: the types to which tensors are rounded before, by name.
    """
    build = ModelBuild(
        ctx=ParallelContext.single(),
        vocab=VocabSize(sizes.vocab_rows, sizes.vocab_rows),
        seq_length=sizes.positions,  # the rows of a learned table, instead of a flag
        streams=RandomStreams(_SEED),
        precision=PrecisionConfig(),
    )
    config = from_plain(ModelConfig, source.config["model"])
    state = {}
    for name, dtype in rounded.items():
        stored = source.read(name, whole(source.tensors[name].global_shape))
        state[name.removeprefix("model/")] = stored.to(dtype).float()
    if sizes.heads is None:
        with torch.device("meta"):
            model: GPTModel | T5Model
            given: tuple[Tensor, ...] = (inputs.tokens,)
            if sizes.decoder is None:
                model = GPTModel(config, build)
            else:
                model = T5Model(config, build, sizes.decoder)
                given = (inputs.tokens, inputs.padding_mask, inputs.decoder_tokens)
        model.load_state_dict(state, assign=True)
        logits = model.eval()(*given)
        assert isinstance(logits, Tensor)  # noqa: S101  # invariant: no labels were given
        return {"logits": logits.transpose(0, 1)}
    specs = _bert_specs(config, build, sizes.heads)
    with torch.device("meta"):
        stage = PipelineStage(specs)
    stage.load_state_dict(state, assign=True)
    return _bert_outputs(stage.eval(), specs, inputs)


def _bert_specs(config: ModelConfig, build: ModelBuild, heads: BertHeads) -> list[LayerSpec]:
    """Return the layers of a BERT with these heads; there may be fewer than in training."""
    if heads.classes:
        return list(classification_layers(config, build, num_classes=heads.classes))
    absent = set() if heads.order else {"order_head"}
    if not heads.words:
        absent |= {"lm_head", "output", "output_bias"}
    layers = bert_layers(config, build, order_head=heads.pooler)
    return [
        spec
        for spec in layers
        if spec.name not in absent and (heads.words or spec.call != "logits")
    ]


def _bert_outputs(stage: PipelineStage, specs: Sequence[LayerSpec], inputs: Inputs) -> Outputs:
    """Return the inputs and outputs of the heads; hidden states of real tokens only."""
    carry = bert_carry(*inputs)
    true = inputs.padding_mask.bool()
    found: dict[str, Tensor] = {}
    for spec in specs:
        carry = run_layers(stage, [spec], carry)
        if spec.name == "final_norm":
            found["hidden states"] = carry[0].transpose(0, 1)[true]
        elif spec.name == "pooler":
            found["pooled rows"] = carry[1]
        elif spec.name == "order_head":
            found["order scores"] = carry[1]
        elif spec.name == "output_bias":
            found["word scores"] = carry[0].transpose(0, 1)[true]
        elif spec.name == "classification_head":
            found["class scores"] = carry[0]
    return found


@torch.no_grad()
def their_outputs(folder: Path, inputs: Inputs, sizes: Sizes) -> Outputs:
    """Return the outputs of transformers in float32 from `folder`, in the same shapes."""
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}
    if sizes.decoder is not None:
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, **options)
        logits = model.eval()(
            input_ids=inputs.tokens,
            attention_mask=inputs.padding_mask,
            decoder_input_ids=inputs.decoder_tokens,
        ).logits
        return {"logits": logits}
    if sizes.heads is None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
        return {"logits": model.eval()(inputs.tokens).logits}
    (name,) = transformers.AutoConfig.from_pretrained(folder).architectures
    model = getattr(transformers, name).from_pretrained(folder, **options).eval()
    given = {
        "input_ids": inputs.tokens,
        "token_type_ids": inputs.types,
        "attention_mask": inputs.padding_mask,
    }
    true = inputs.padding_mask.bool()
    base = model.base_model(**given)
    found: dict[str, Tensor] = {"hidden states": base.last_hidden_state[true]}
    heads = sizes.heads
    if heads.pooler and base.pooler_output is not None:
        found["pooled rows"] = base.pooler_output
    if not (heads.words or heads.order or heads.classes):
        return found
    scores = model(**given)
    if heads.words and heads.order:
        return found | {
            "word scores": scores.prediction_logits[true],
            "order scores": scores.seq_relationship_logits,
        }
    if heads.words:
        return found | {"word scores": scores.logits[true]}
    return found | {"class scores" if heads.classes else "order scores": scores.logits}


if __name__ == "__main__":
    run_program(main)
