"""The launch that a command line describes, and its plan: what all programs that plan share.

The flags are those of a training program, and `--world-size` with the others of `add_plan_flags`
beside them. Nothing is read but the tokenizer.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import finetune_t0_non_causal_decoder
import pretrain_bert
import pretrain_gpt
import pretrain_ict
import pretrain_prefix_lm
import pretrain_t5
import pretrain_vit
from megatron.arguments import CommandLineError, parse_args
from megatron.config.run import RunConfig
from megatron.engine.base import PretrainTask
from megatron.errors import ConfigError, PreflightError
from megatron.initialize import run_plan, with_findings_of_checks
from megatron.launch import Launch
from megatron.planning.hardware import Hardware, read_hardware
from megatron.planning.rehearsal import World, flops_of_model, rehearse
from megatron.planning.step_time import bubble, step_time
from megatron.preflight.checks import LAYOUT_CHECKS
from megatron.preflight.run import RunPlan
from tools.planning.tables import Plan


class Program(NamedTuple):
    """A training program: its module, and the task of a run that its flags describe."""

    module: ModuleType
    task: Callable[[RunConfig], PretrainTask]
    adapted: Callable[[RunConfig], RunConfig] = lambda config: config  # as it takes its flags


# The programs whose flags can be planned, by the names of their tasks.
PROGRAMS: Mapping[str, Program] = {
    "gpt": Program(pretrain_gpt, lambda _: pretrain_gpt.gpt_task()),
    "prefix-lm": Program(pretrain_prefix_lm, lambda _: pretrain_prefix_lm.prefix_lm_task()),
    "t0": Program(
        finetune_t0_non_causal_decoder, lambda _: finetune_t0_non_causal_decoder.t0_task()
    ),
    "bert": Program(
        pretrain_bert,
        lambda config: pretrain_bert.bert_task(order_head=config.data.bert_binary_head),
    ),
    "ict": Program(pretrain_ict, pretrain_ict.ict_task),
    "t5": Program(
        pretrain_t5, lambda config: pretrain_t5.t5_task(config.encoder_decoder, config.data)
    ),
    "vit": Program(
        pretrain_vit,
        lambda config: pretrain_vit.vit_task(config.vision),
        adapted=pretrain_vit.run_of_images,
    ),
}
AddFlags = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


class PlannedLaunch(NamedTuple):
    """A launch on ranks that are not there, before anything of it is checked."""

    config: RunConfig
    task: PretrainTask
    world_size: int
    hardware: Hardware | None

    def run_plan(self, ranks_per_node: int | None = None) -> RunPlan:
        """Return what the checks of a launch take; the tokenizer is built."""
        size = min(self.world_size, ranks_per_node or self.world_size)
        launch = Launch(world_size=self.world_size, local_world_size=size)
        return run_plan(self.config, launch, self.task.reads)


def add_plan_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of every program that plans a run."""
    add = parser.add_argument_group("the plan").add_argument
    add("--world-size", type=int, required=True, metavar="N", help="ranks of the run")
    add("--task", choices=tuple(PROGRAMS), default="gpt", help="whose flags they are [gpt]")
    add(
        "--ranks",
        type=int,
        nargs="+",
        metavar="RANK",
        help="ranks to plan; one of every pipeline stage if not given",
    )
    add("--hardware", metavar="FILE", help="JSON about the machines, for a time")
    add("--memory-gib", type=float, metavar="GIB", help="what a rank may use")
    add("--json", action="store_true", help="print JSON for programs")
    return parser


def launch_of(
    argv: Sequence[str] | None, add_flags: AddFlags = add_plan_flags, **defaults: object
) -> PlannedLaunch:
    """Return the launch that a command line describes.

    Args:
        add_flags: adds the flags of the program, those of `add_plan_flags` among them.
        defaults: values of flags that the command line does not give.

    Raises:
        PreflightError: with all that is wrong with the flags, and with the layout as far as they
            can be read.
        ConfigError: the ranks or the hardware make no sense.
    """
    given = sys.argv[1:] if argv is None else argv
    # Another word is refused by the parser.
    program = PROGRAMS.get(_word_after("--task", given), PROGRAMS["gpt"])
    size = _word_after("--world-size", given)
    number = int(size) if size.isdecimal() else None
    try:
        config = parse_args(
            given,
            extra_args_provider=add_flags,
            args_defaults={
                "tokenizer_type": program.module.TOKENIZER_TYPE,
                **getattr(program.module, "DEFAULTS", {}),
                **defaults,
            },
            world_size=number,
        )
    except CommandLineError as wrong:
        raise _with_layout(wrong, program, number) from None
    size_given = int(config.extra["world_size"])
    if size_given < 1:
        raise ConfigError(
            "a world has no ranks", found=f"--world-size {size_given}", fix="use 1 or more"
        )
    hardware = _hardware(config.extra["hardware"], config)
    with redirect_stdout(sys.stderr):  # what it notes stands beside the plan, which may be JSON
        config = program.adapted(config)
    return PlannedLaunch(config, program.task(config), size_given, hardware)


def plan_of_world(world: World, ranks: Sequence[int] | None, hardware: Hardware | None) -> Plan:
    """Return the plan of `ranks` (None: one of every stage).

    Raises:
        ConfigError: there is no such rank.
    """
    planned = rehearse(world, ranks or world.representatives())
    time = None if hardware is None else step_time(world, planned, hardware)
    share = bubble(world).bubble_share
    return Plan(world, planned, flops_of_model(world), share, hardware, time)


def _word_after(flag: str, argv: Sequence[str]) -> str:
    return next(iter(argv[argv.index(flag) + 1 :][:1]), "") if flag in argv else ""


def _with_layout(wrong: CommandLineError, program: Program, size: int | None) -> PreflightError:
    """Return the errors of a command line with those of the layout, if it can be read."""
    if wrong.config is None or not size:
        return wrong
    reads = program.task(wrong.config).reads
    launch = Launch(world_size=size, local_world_size=size)
    return with_findings_of_checks(wrong, LAYOUT_CHECKS, reads=reads, launch=launch)


def _hardware(path: str | None, config: RunConfig) -> Hardware | None:
    if path is None:
        return None
    hardware = read_hardware(Path(path))
    hardware.peak(config)  # raises at once where it is missing
    return hardware
