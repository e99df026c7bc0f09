"""Plan a training on ranks that are not there: bytes, FLOPs, communication, bubble and time.

`python -m tools.plan --world-size N <the flags of the launch of pretrain_gpt.py>`. The code of the
run itself does a step on `meta`, in this process; nothing is read but the tokenizer. With
`--search` the layout is proposed. See docs/planning.md.
"""

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.arguments import parse_given
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.initialize import tokenizer_of
from megatron.planning.layouts import SearchedRun
from megatron.planning.rehearsal import World
from megatron.planning.search import Candidate, Limits, Search, search
from megatron.preflight.checks import LAYOUT_CHECKS
from megatron.preflight.run import run_preflight
from megatron.program import run_program
from tools.planning.launch import add_plan_flags, launch_of, plan_of_world
from tools.planning.tables import GIB, Plan, as_json, as_text


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags, rehearse the step, and print the plan."""
    given = sys.argv[1:] if argv is None else argv
    if "--search" in given:
        found = search_of(given)
        is_json = "--json" in given
        shown = json.dumps(search_as_json(found), indent=2) if is_json else search_as_text(found)
        print(shown if isinstance(shown, str) else "\n".join(shown))
        return
    plan = plan_of(given)
    if plan.world.config.extra["json"]:
        print(json.dumps(as_json(plan), indent=2))
    else:
        print("\n".join(as_text(plan)))


def plan_of(argv: Sequence[str] | None = None) -> Plan:
    """Return the plan that a command line asks for.

    Raises:
        PreflightError: with all that is wrong with the flags and the layout.
        ConfigError: there is no such rank, or the hardware is not described well.
    """
    launch = launch_of(argv, _own_flags)
    plan = launch.run_plan()
    run_preflight(plan, LAYOUT_CHECKS)
    assert plan.tokenizer is not None  # noqa: S101  # invariant: checked
    world = World.of(launch.config, launch.task, plan.tokenizer, launch.world_size)
    return plan_of_world(world, launch.config.extra["ranks"], launch.hardware)


def search_of(argv: Sequence[str]) -> Search:
    """Return the layouts that a command line with `--search` asks for.

    Raises:
        CommandLineError: with all that is wrong with the flags.
        ConfigError: a flag of the search is missing or makes no sense, or no layout fits.
    """
    # It has to be given to a training; here the search gives it.
    launch = launch_of(argv, _own_flags, micro_batch_size=1)
    config, hardware = launch.config, launch.hardware
    extra = config.extra
    gib, rehearsals = extra["memory_gib"], int(extra["search_rehearsals"])
    for flag, is_right, fix in (
        ("--memory-gib", gib is not None and 0 < gib < math.inf, "--memory-gib 80"),
        ("--hardware", hardware is not None, "--hardware FILE, as in docs/planning.md"),
        ("--search-rehearsals", rehearsals > 0, "--search-rehearsals 16"),
        (
            "--global-batch-size",
            config.training.global_batch_size is not None,
            "--global-batch-size 1024",
        ),
        ("--ranks", extra["ranks"] is None, "--search alone: it chooses ranks of every layout"),
    ):
        if not is_right:
            raise ConfigError(
                "the search lacks what it needs, or a flag of it makes no sense",
                found=f"{flag} {_value(config, flag)}",
                fix=f"use {fix}",
            )
    assert hardware is not None  # noqa: S101  # invariant: just checked
    own = _own_flags(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    fixed = frozenset(parse_given(own.parse_known_args(argv)[1]))
    run = SearchedRun(config, launch.task, tokenizer_of(config), launch.world_size, fixed)
    tell = partial(print, file=sys.stderr, flush=True)
    return search(run, hardware, Limits(int(gib * GIB), rehearsals), tell)


def search_as_json(found: Search) -> dict[str, Any]:
    """Return the search as JSON values: bytes and seconds."""
    return {
        "layouts": [_candidate_as_json(one) for one in found.fitting],
        "rehearsed_over_memory": found.over,
        "over_memory_by_lower_bound": found.pruned,
        "slower_by_recomputation": found.slower,
        "not_tried": found.untried,
    }


def search_as_text(found: Search) -> Iterator[str]:
    """Yield the lines of the table of a search."""
    names = ("peak GiB", "step s", "compute", "waiting", "idle", "update", "tokens/s", "bubble")
    yield "".join(f"{name:>10}" for name in names) + "  layout"
    for one in found.fitting:
        time = one.time
        assert time is not None  # noqa: S101  # invariant: it fits
        waiting = sum(time.exposed.values())
        parts = (time.total, time.compute, waiting, time.bubble, time.update)
        columns = "".join(f"{seconds:>10.4g}" for seconds in parts)
        yield (
            f"{one.peak / GIB:>10.3f}{columns}{one.tokens_per_second:>10.1f}"
            f"{one.bubble_share:>10.2%}  {' '.join(one.layout.flags)}"
        )
    yield ""
    yield f"rehearsed: {len(found.fitting)} layouts that fit, {found.over} that do not"
    yield f"left out: {found.pruned} layouts that need more memory by a lower bound"
    yield f"left out: {found.slower} layouts that recompute more than one of those that fit"
    more = "; --search-rehearsals tries more" if found.untried else ""
    yield f"not tried: {found.untried} layouts{more}"


def _candidate_as_json(one: Candidate) -> dict[str, Any]:
    assert one.time is not None  # noqa: S101  # invariant: it fits
    return {
        "flags": list(one.layout.flags),
        "peak_bytes": one.peak,
        "seconds": one.time._asdict(),
        "tokens_per_second_per_rank": one.tokens_per_second,
        "bubble_share": one.bubble_share,
    }


def _value(config: RunConfig, flag: str) -> object:
    name = flag[2:].replace("-", "_")
    value = config.extra.get(name)
    return "not given" if value is None else value


def _own_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add = add_plan_flags(parser).add_argument_group("the search").add_argument
    add("--search", action="store_true", help="propose layouts: flags of it that are given stay")
    add(
        "--search-rehearsals",
        type=int,
        default=16,
        metavar="N",
        help="layouts that --search rehearses at most [16]",
    )
    return parser


if __name__ == "__main__":
    run_program(main)
