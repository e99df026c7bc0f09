"""The search for layouts: what it proposes is rehearsed and fits, and it says what it left out."""

from collections.abc import Iterator, Sequence

import pytest

from megatron.errors import ConfigError
from megatron.planning import search as search_module
from megatron.planning.layouts import layouts
from megatron.planning.rehearsal import RankPlan, World, rehearsed
from megatron.planning.search import Limits, search
from megatron.planning.step_time import step_time
from tests.unit.planning.test_layouts import run_of
from tests.unit.planning.test_step_time import SLOW

PLENTY = 2**40
FEW = (  # the replicas' sharding, and recomputation, of one layout of stages
    *("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "2"),
    *("--num-layers", "2", "--context-parallel-size", "1"),
    *("--pipeline-schedule", "1f1b", "--micro-batch-size", "1"),
)


REHEARSED: dict[tuple[str, int], RankPlan] = {}


def rehearsed_once(world: World, ranks: Sequence[int]) -> Iterator[RankPlan]:
    """Rehearse a rank of a layout once: all searches here have the same dozen layouts."""
    for rank in ranks:
        key = str(world.config), rank
        if key not in REHEARSED:
            (REHEARSED[key],) = rehearsed(world, [rank])
        yield REHEARSED[key]


@pytest.fixture(autouse=True)
def _searches_share_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "rehearsed", rehearsed_once)


def ignored(line: str) -> None:
    """Nobody reads it."""


def test_what_is_proposed_is_what_a_rehearsal_finds_and_the_fastest_is_first() -> None:
    run = run_of(4, *FEW)
    told: list[str] = []
    found = search(run, SLOW, Limits(PLENTY, 100), told.append)
    assert len(found.fitting) == 4  # shardings; of these more recomputation only takes longer
    assert (found.over, found.pruned, found.slower, found.untried) == (0, 0, 8, 0)
    for one in found.fitting:
        world = one.layout.world
        plans = [*rehearsed_once(world, world.representatives())]
        assert one.peak == max(plan.bytes.peak for plan in plans)
        assert one.time == step_time(world, plans, SLOW)
        assert one.tokens_per_second == pytest.approx(8 * 16 / 4 / one.time.total)
    assert len(told) == 4
    for number, line in enumerate(told, 1):
        assert line.startswith(f"{number} of 12 layouts: 0.0 GiB, ")
    seconds = [one.time.total for one in found.fitting if one.time is not None]
    assert seconds == sorted(seconds)


def test_every_layout_is_counted_once() -> None:
    run = run_of(4, *FEW)
    worlds = [layout.world for layout in layouts(run)]
    every = [max(plan.bytes.peak for plan in rehearsed_once(world, world.representatives()))
             for world in worlds]  # fmt: skip
    limit = sorted(every)[len(every) // 2]
    found = search(run, SLOW, Limits(limit, 100), ignored)
    assert found.fitting
    assert all(one.peak <= limit for one in found.fitting)
    assert found.over + found.pruned + found.slower + len(found.fitting) == len(every)
    assert found.over + found.pruned <= sum(peak > limit for peak in every)
    budget = search(run, SLOW, Limits(limit, 1 + found.over), ignored)
    counts = (len(budget.fitting), budget.over, budget.pruned, budget.slower, budget.untried)
    assert sum(counts) == len(every)
    assert budget.untried > 0


def test_where_nothing_fits_the_nearest_layout_and_the_missing_bytes_are_named() -> None:
    run = run_of(4, *FEW)
    bounds = [layout.at_least for layout in layouts(run)]
    with pytest.raises(ConfigError) as raised:
        search(run, SLOW, Limits(1000, 100), ignored)
    assert f"{min(bounds) - 1000} bytes too much" in str(raised.value)
    assert "--data-parallel-sharding-strategy optim_grads_params" in str(raised.value)
    # The smallest passes its bound, and its rehearsal does not fit.
    with pytest.raises(ConfigError) as raised:
        search(run, SLOW, Limits(min(bounds), 100), ignored)
    assert "(1 were rehearsed and 0 not tried)" in str(raised.value)


def test_no_layout_at_all_is_an_error_with_the_flags_that_were_given() -> None:
    with pytest.raises(ConfigError) as raised:
        search(run_of(4, "--tensor-model-parallel-size", "3"), SLOW, Limits(PLENTY, 1), ignored)
    assert "given of the layout: --tensor-model-parallel-size" in str(raised.value)
