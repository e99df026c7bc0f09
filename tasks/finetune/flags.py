"""The flags of fine-tuning: its own, and which of pretraining's mean nothing here.

Launch scripts that were written for other Megatrons run unchanged where their features exist: a
flag without effect is noted, and one that would change results is refused with the reason.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron import log
from megatron.arguments import parse_args
from megatron.config.run import RunConfig
from megatron.errors import ConfigError, Finding, PreflightError
from megatron.lengths import curriculum

# Flags in launch scripts for other Megatrons, and why they have no effect.
_JUDGED_WHOLE = "all of --valid-data is judged after each epoch"
NO_EFFECT: Mapping[str, str] = {
    "--eval-interval": _JUDGED_WHOLE,
    "--eval-iters": _JUDGED_WHOLE,
    "--data-impl": "examples are read, not a corpus",
    "--split": "examples are read, not a corpus",
}

_LENGTH = "--epochs, the length of fine-tuning"
_EXAMPLES = "--train-data and --valid-data, with the files of the task"
_WHOLE_ROWS = "rows of --seq-length; leave it out"
_BEST = "--save, which holds the best epoch; --keep-last limits how many earlier ones"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("--train-iters", "--train-samples", "--train-tokens"), _LENGTH),
    **dict.fromkeys(
        (
            "--data-path",
            "--mock-data",
            "--train-data-path",
            "--valid-data-path",
            "--test-data-path",
            "--train-weighted-split-paths",
            "--valid-weighted-split-paths",
            "--test-weighted-split-paths",
            "--train-weighted-split-paths-path",
            "--valid-weighted-split-paths-path",
            "--test-weighted-split-paths-path",
        ),
        _EXAMPLES,
    ),
    **dict.fromkeys(
        (
            "--curriculum-schedule",
            "--curriculum-seqlen-min",
            "--curriculum-seqlen-max",
            "--curriculum-iters",
            "--curriculum-seqlens",
        ),
        _WHOLE_ROWS,
    ),
    **dict.fromkeys(("--keep-best", "--keep-every"), _BEST),
    "--load-only": "--pretrained-checkpoint, of which everything but the head is loaded, with "
    "--load-except for more that is not",
    **dict.fromkeys(
        ("--rampup-batch-size", "--step-batch-size-schedule"), "one --global-batch-size"
    ),
    "--z-loss-coeff": "the cross entropy over classes alone; leave it out",
    "--skip-train-iteration-range": "files without those examples",
    "--loss-spike-factor": "the scores after each epoch; leave it out",
    "--loss-spike-action": "the scores after each epoch; leave it out",
    "--eval-only": "--epochs 0",
    "--skip-train": "--epochs 0",
    "--eval-at-start": "a run with --epochs 0 before it",
    "--async-save": "checkpoints that are whole before training goes on; leave it out",
    "--non-persistent-save-interval": "--save-interval, whose last checkpoint is gone on from",
}


class Flags(NamedTuple):
    """The flags of a fine-tuning."""

    own: argparse.Namespace
    config: RunConfig


def read_flags(name: str, argv: Sequence[str]) -> Flags:
    """Parse the flags of a task; PreflightError with all that is wrong."""
    own, rest = _parser(name).parse_known_args(argv)
    if own.keep_last:
        rest += ["--keep-last", own.keep_last]
    elif own.keep_last is not None:
        log.info("--keep-last has no effect here: the last batch of an epoch is never left out")
    given_flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    for flag in dict.fromkeys(given_flags):
        if flag in NO_EFFECT:
            log.info(f"{flag} has no effect here: {NO_EFFECT[flag]}")
    problems = list(_problems(own, given_flags))
    if problems:
        raise PreflightError(Finding("flags_of_the_task", problem) for problem in problems)
    config = parse_args(
        rest,
        args_defaults={
            "tokenizer_type": "BertWordPieceLowerCase",
            "data_path": ("no corpus",),  # examples are read instead
            "train_iters": 1,  # as many as the epochs have; known when the examples are
        },
    )
    # Imported here because it needs torch, and mistakes in flags are reported without it.
    from megatron.checkpoint.formats import registry

    if not registry.get(config.checkpoint.checkpoint_format).is_native:
        raise ConfigError(
            "fine-tuning saves in our own format alone",
            found=f"--checkpoint-format {config.checkpoint.checkpoint_format}",
            fix="leave it out; tools/convert_checkpoint.py writes other formats",
        )
    if config.model.has_router_loss:
        raise ConfigError(
            "fine-tuning has no losses of routers: what fills up the last batch would count",
            found=f"--moe-aux-loss-coeff {config.model.moe_aux_loss_coeff}, --moe-z-loss-coeff "
            f"{config.model.moe_z_loss_coeff}",
            fix="leave both out; the weights are the same model without them",
        )
    own_tp = {"expert_tensor_parallel_size": config.parallel.tensor_model_parallel_size}
    names = ("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
    for name in names:
        size = getattr(config.parallel, name)
        if size not in (None, own_tp.get(name, 1)):
            raise ConfigError(
                "fine-tuning shares neither sequences nor experts over ranks",
                found=f"--{name.replace('_', '-')} {size}",
                fix="leave it out; the ranks then read other examples",
            )
    if curriculum(config) is not None:  # of DeepSpeed's JSON; the flags are refused above
        raise ConfigError(
            "fine-tuning has no curriculum of lengths",
            found="curriculum_learning in the JSON of --deepspeed_config",
            fix=f"use {_WHOLE_ROWS}",
        )
    return Flags(own, config)


def _parser(name: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"tasks.main --task {name}",
        allow_abbrev=False,
        epilog="All flags of pretrain_bert.py go here too (--num-layers, --lr, --save ...).",
    )
    add = made.add_argument
    add("--train-data", nargs="+", metavar="FILE", help="files to train on")
    add(
        "--valid-data",
        nargs="+",
        metavar="FILE",
        help="files to judge by; of several each has metrics of its own",
    )
    add("--epochs", type=int, default=3, help="passes over the training files; 0: judge only [3]")
    add(
        "--load-except",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="leave parameters whose names match one of these at initial values",
    )
    add("--predictions", metavar="FILE", help="write there what is decided of --valid-data")
    add("--output", metavar="FILE", help="write the metrics there, as JSON")
    add(
        "--keep-last",
        nargs="?",
        const="",
        metavar="N",
        help="earlier best epochs to keep in --save; alone, as in Megatron, it has no effect",
    )
    return made


def _problems(own: argparse.Namespace, given_flags: Sequence[str]) -> Iterator[ConfigError]:
    for flag in dict.fromkeys(given_flags):
        if flag in REFUSED:
            yield ConfigError(
                "a flag of pretraining means nothing for fine-tuning",
                found=flag,
                fix=f"use {REFUSED[flag]}",
            )
    if own.valid_data is None:
        yield ConfigError(
            "there is nothing to judge by", found="no --valid-data", fix="add --valid-data FILE"
        )
    if own.epochs < 0:
        yield ConfigError(
            "epochs are negative", found=f"--epochs {own.epochs}", fix="use 0 to judge only"
        )
    if own.epochs > 0 and not own.train_data:
        yield ConfigError(
            "there is nothing to train on",
            found=f"--epochs {own.epochs} without --train-data",
            fix="add --train-data FILE, or use --epochs 0",
        )
