"""Does `transformers` compute from an exported folder what our model computes from its checkpoint?

`check_export` is what the converter calls after it has written a Hugging Face folder; the program
does the same for any pair: `python -m tools.compare_with_transformers --load CHECKPOINT
--huggingface FOLDER`. Both models are built in float32 on the CPU, and so have to fit there twice.
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from megatron import log
from megatron.checkpoint import source_formats
from megatron.checkpoint.boxes import whole
from megatron.checkpoint.formats.huggingface import HuggingFaceSource
from megatron.checkpoint.safetensors_io import dtype_of
from megatron.checkpoint.source import CheckpointSource, SourceOptions
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import ModelBuild, VocabSize
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams
from megatron.program import run

ROWS, LENGTH = 2, 64
# Of the largest logit. float32 over dozens of layers leaves 1e-5; the smallest thing that can be
# wrong with a table of names, one form of GELU for the other, leaves more than this.
TOLERANCE = 1e-4
_SEED = 1234


@dataclass(frozen=True)
class Comparison:
    """How far apart the logits of the two are."""

    largest: float  # logit of transformers
    apart: float  # largest difference
    tokens: int

    @property
    def is_equal(self) -> bool:
        """Whether the difference is no more than rounding."""
        return self.apart <= TOLERANCE * max(self.largest, 1.0)

    def __str__(self) -> str:
        return (
            f"logits of {self.tokens} tokens differ by at most {self.apart:.1e} "
            f"(the largest is {self.largest:.3g})"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags, compare, and say how far apart the two are."""
    parser = argparse.ArgumentParser(prog="compare_with_transformers", description=__doc__)
    parser.add_argument("--load", required=True, metavar="FOLDER", help="checkpoint of any format")
    parser.add_argument("--iteration", type=int, help="which one; when not given the latest")
    parser.add_argument("--huggingface", required=True, metavar="FOLDER", help="what was exported")
    args = parser.parse_args(argv)
    with source_formats.open_source(args.load, args.iteration) as source:
        if check_export(source, Path(args.huggingface)) is None:
            raise ConfigError(
                "there is nothing to compare with",
                found="transformers is not installed",
                fix="pip install transformers",
            )


@torch.no_grad()
def check_export(source: CheckpointSource, folder: Path) -> Comparison | None:
    """Compare the logits of `source` and of the Hugging Face folder made from it.

    None, which is said in the log, where `transformers` is not installed.

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
        rows, dtypes = exported.sizes.vocab_rows, exported.tensors
        length = min(LENGTH, exported.sizes.positions)
        generator = torch.Generator().manual_seed(_SEED)
        tokens = torch.randint(0, rows, (ROWS, length), generator=generator)
        # Rounded as the export rounds, so that what is left is how it is computed.
        rounded = {name: dtype_of(found.dtype_code) for name, found in dtypes.items()}
    ours = _our_logits(source, tokens, rows, rounded)
    theirs = _their_logits(folder, tokens)
    found = Comparison(float(theirs.abs().max()), float((ours - theirs).abs().max()), ROWS * length)
    if not found.is_equal:
        raise CheckpointError(
            "transformers does not compute from the exported folder what this program computes",
            found=f"{folder}: {found}",
            fix="do not use the folder; report this with the config of the run",
        )
    log.info(f"{folder}: {found}: transformers computes the same model")
    return found


def _our_logits(
    source: CheckpointSource, tokens: Tensor, rows: int, rounded: dict[str, torch.dtype]
) -> Tensor:
    """[b, s, v] in float32."""
    build = ModelBuild(
        ctx=ParallelContext.single(),
        vocab=VocabSize(rows, rows),
        seq_length=tokens.shape[1],
        streams=RandomStreams(_SEED, tp_rank=0, dp_rank=0, pp_rank=0),
        precision=PrecisionConfig(),
    )
    config = from_plain(ModelConfig, source.config["model"])
    with torch.device("meta"):
        model = GPTModel(config, build)
    state = {}
    for name, dtype in rounded.items():
        stored = source.read(name, whole(source.tensors[name].global_shape))
        state[name.removeprefix("model/")] = stored.to(dtype).float()
    model.load_state_dict(state, assign=True)
    logits = model.eval()(tokens)
    assert isinstance(logits, Tensor)  # noqa: S101  # invariant: no labels were given
    return logits.transpose(0, 1)


def _their_logits(folder: Path, tokens: Tensor) -> Tensor:
    """[b, s, v] in float32."""
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    logits: Tensor = model.eval()(tokens).logits
    return logits


if __name__ == "__main__":
    run(main)
