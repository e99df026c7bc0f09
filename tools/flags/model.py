"""The flags of programs that use a trained GPT: which one, spread how, in which numbers.

Model and tokenizer are the checkpoint's own. All flags of pretrain_gpt.py are understood beside the
program's, so that scripts written for other Megatrons start: flags of the model are compared with
the checkpoint, and those that only affect training are named.
"""

import argparse
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from megatron import log
from megatron.arguments import parse_given
from megatron.checkpoint.load.inference_config import PRECISIONS
from megatron.config.runtime import DeviceKind
from megatron.errors import ConfigError
from megatron.launch import launch_from_environment

# Flags of the parser below that stand for a field of a run.
_FIELDS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size"),
    *("seq_length", "device"),
)
EPILOG = (
    "All flags of pretrain_gpt.py are understood here too. Flags of the model have to agree with "
    "the checkpoint, or fill in what it does not record; --fp16, --bf16 or "
    "--fp32 chooses the precision, and flags of the tokenizer where its files lie."
)


class ModelChoice(NamedTuple):
    """The model that a program uses, and the flags that override its checkpoint."""

    folder: str
    iteration: int | None
    given: dict[str, Any]  # by the fields of a run
    weight_quantization: Literal["int8", "fp8"] | None = None


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every program that uses a model."""
    add = parser.add_argument
    add("--load", required=True, metavar="FOLDER", help="checkpoint of a GPT, of any format")
    add("--iteration", type=int, help="which of them; the newest when not given")
    add("--tensor-model-parallel-size", type=int, metavar="N", help="ranks that share a layer [1]")
    add("--device", choices=("cpu", "cuda"), help="where to compute; as in training when not given")
    add("--fp32", action="store_true", help="compute in float32, whatever it was trained in")
    add("--weight-quantization", choices=("int8", "fp8"), help=_QUANTIZATION_HELP)
    add("--inference", action="store_true", help=argparse.SUPPRESS)  # bigscience's scripts
    parser.epilog = EPILOG


_QUANTIZATION_HELP = "store weights of linear layers in 8 bits, with a scale for each output"


def read_model_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, ModelChoice]:
    """Return the program's own flags, and its choice of a model.

    Raises:
        CommandLineError: a flag that no program has, or a value that cannot be read.
        ConfigError: flags that contradict each other.
    """
    launch = launch_from_environment()  # only rank 0 prints, from the first line on
    log.configure(launch.rank, launch.world_size)
    own, rest = parser.parse_known_args(argv)
    given = parse_given(rest, beside=parser._option_string_actions)
    if own.inference:
        log.info("--inference: accepted, has no effect here because this program trains nothing")
    for name in _FIELDS:
        value = getattr(own, name, None)
        if value is not None:
            given[name] = DeviceKind(value) if name == "device" else value
    if own.fp32:
        chosen = [f"--{name}" for name in PRECISIONS if given.get(name)]
        if chosen:
            raise ConfigError(
                "more than one precision was asked for",
                found=f"--fp32 {' '.join(chosen)}",
                fix="keep one of them",
            )
        given |= dict.fromkeys(PRECISIONS, False)
    iteration = given.get("load_iteration") if own.iteration is None else own.iteration
    assert iteration is None or isinstance(iteration, int)  # noqa: S101  # invariant: of its flag
    return own, ModelChoice(own.load, iteration, given, own.weight_quantization)
