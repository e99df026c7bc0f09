"""A search for layouts that fit into memory, ranked by the estimate of their time.

Every layout in the result is rehearsed. A layout whose lower bound is above the limit is left out
without; how many were, and how many were not tried, is part of the result.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.config.activations import RecomputeGranularity
from megatron.errors import ConfigError
from megatron.planning.hardware import Hardware
from megatron.planning.layouts import (
    LAYOUT_FLAGS,
    RECOMPUTATION,
    Layout,
    SearchedRun,
    guess_seconds,
    layouts,
)
from megatron.planning.rehearsal import RankPlan, flops_of_model, rehearsed
from megatron.planning.step_time import StepTime, bubble, step_time

_ABOUT_EQUAL = 0.1  # relative, of guesses of the time


class Candidate(NamedTuple):
    """A layout that was rehearsed."""

    layout: Layout
    peak: int  # bytes, of the rank that needs most; of the first one above the limit otherwise
    time: StepTime | None  # None: it does not fit
    bubble_share: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of each rank."""
        assert self.time is not None  # noqa: S101  # invariant: callers take those that fit
        world = self.layout.world
        tokens = world.samples * world.config.data.seq_length
        return tokens / self.time.total / world.topology.world_size


class Search(NamedTuple):
    """The layouts that fit, fastest first, and how many others there are."""

    fitting: tuple[Candidate, ...]
    over: int  # were rehearsed, and do not fit
    pruned: int  # need more than the limit by a lower bound
    slower: int  # are a layout that fits, with more computed again
    untried: int


class Limits(NamedTuple):
    """Bytes that a rank may use, and how many layouts are rehearsed at most."""

    memory: int
    rehearsals: int


def search(
    run: SearchedRun, hardware: Hardware, limits: Limits, tell: Callable[[str], object]
) -> Search:
    """Return the layouts of a run that fit into memory.

    Args:
        tell: is called with a line for each layout once it was rehearsed, which takes a while.

    Raises:
        ConfigError: there is no layout, or none that was rehearsed fits.
    """
    there = list(layouts(run))
    if not there:
        given = " ".join(
            sorted(
                "--" + name.replace("_", "-")
                for group in LAYOUT_FLAGS
                for name in group
                if name in run.fixed
            )
        )
        raise ConfigError(
            "no layout of these ranks goes together with the flags that were given",
            found=f"{run.world_size} ranks, --global-batch-size "
            f"{run.config.training.global_batch_size}; given of the layout: {given or 'nothing'}",
            fix="give fewer flags of the layout, or another number of ranks or batch",
        )
    small = [layout for layout in there if layout.at_least <= limits.memory]
    if not small:
        least = min(there, key=lambda layout: layout.at_least)
        raise _nothing_fits(least, least.at_least, limits, f"all {len(there)} need more")
    waiting = _by_guess(small, hardware)
    ratios: dict[str, float] = {}  # of rehearsed bytes to the bound, by recomputation
    fitting: list[Candidate] = []
    over: list[Candidate] = []
    slower = 0
    while waiting and len(fitting) + len(over) < limits.rehearsals:

        def is_late(layout: Layout) -> bool:
            return layout.at_least * ratios.get(_kind(layout), 1.0) > limits.memory

        layout = min(waiting, key=is_late)  # the first one, of those that may fit if there are any
        waiting.remove(layout)
        found = _rehearse(layout, hardware, limits.memory)
        ratios[_kind(layout)] = found.peak / layout.at_least
        tried = len(fitting) + len(over) + 1
        tell(f"{tried} of {min(limits.rehearsals, len(small))} layouts: {_description_of(found)}")
        (over if found.time is None else fitting).append(found)
        if found.time is not None:
            more = [other for other in waiting if _only_recomputes_more(other, layout)]
            waiting = [other for other in waiting if other not in more]
            slower += len(more)
    if not fitting:
        nearest = min(over, key=lambda one: one.peak)
        left = f"{len(over)} were rehearsed and {len(waiting)} not tried"
        raise _nothing_fits(nearest.layout, nearest.peak, limits, left)
    fitting.sort(key=lambda one: one.time.total if one.time is not None else 0.0)
    return Search(tuple(fitting), len(over), len(there) - len(small), slower, len(waiting))


def _by_guess(there: Sequence[Layout], hardware: Hardware) -> list[Layout]:
    """Return them with those first that may be fastest.

    Of about equal guesses those come first that split sequences, layers and matrices least, which
    lose least by what the guess leaves out; then the smallest.
    """
    flops: dict[str, int] = {}
    for layout in there:
        if _kind(layout) not in flops:
            flops[_kind(layout)] = flops_of_model(layout.world)[1]

    def key(layout: Layout) -> tuple[int, int, int, int]:
        guess = guess_seconds(layout, hardware, flops[_kind(layout)])
        grid = layout.world.topology
        about = round(math.log(guess) / math.log(1 + _ABOUT_EQUAL))
        return about, grid.cp, grid.tp * grid.pp, layout.at_least

    return sorted(there, key=key)


def _only_recomputes_more(layout: Layout, other: Layout) -> bool:
    """Return whether they differ in recomputation only."""
    searched = set(layout.choice) | set(other.choice)
    same = all(
        layout.choice.get(name) == other.choice.get(name)
        for name in searched.difference(RECOMPUTATION)
    )
    order = [None, RecomputeGranularity.SELECTIVE, RecomputeGranularity.FULL]
    more, less = (
        order.index(one.world.config.training.recompute_granularity) for one in (layout, other)
    )
    return same and more > less


def _description_of(found: Candidate) -> str:
    size = f"{found.peak / 2**30:.1f} GiB"
    fits = f"{size} and more" if found.time is None else f"{size}, {found.time.total:.3f} s a step"
    return f"{fits}: {' '.join(found.layout.flags)}"


def _kind(layout: Layout) -> str:
    return str(layout.world.config.training.recompute_granularity)


def _rehearse(layout: Layout, hardware: Hardware, memory: int) -> Candidate:
    """Rehearse a rank of each stage, until one does not fit."""
    world, plans = layout.world, list[RankPlan]()
    for plan in rehearsed(world, world.representatives()):
        plans.append(plan)
        if plan.bytes.peak > memory:
            return Candidate(layout, plan.bytes.peak, None, bubble(world).bubble_share)
    peak = max(plan.bytes.peak for plan in plans)
    return Candidate(layout, peak, step_time(world, plans, hardware), bubble(world).bubble_share)


def _nothing_fits(layout: Layout, size: int, limits: Limits, why: str) -> ConfigError:
    gib = 2**30
    missing = size - limits.memory
    return ConfigError(
        "no layout fits into the memory of a rank",
        found=f"the nearest one needs {size / gib:.3f} GiB or more of {limits.memory / gib:.3f}, "
        f"which is {missing} bytes too much: {' '.join(layout.flags)} ({why})",
        fix="use more ranks, give fewer flags of the layout, or raise --search-rehearsals or "
        "--memory-gib",
    )
