"""Who holds which layers: exact cuts against brute force, Megatron's counts, every refusal."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.mpu.stage_plan import (
    LayerRange,
    even_counts,
    holders,
    listed_counts,
    plan_stages,
    ranges_of_counts,
    ranges_of_stage,
)
from tests.support.examples import examples

costs_of_layers = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=9)


def cuts(count: int, parts: int) -> Iterator[list[LayerRange]]:
    for inner in combinations(range(1, count), parts - 1):
        yield [LayerRange(a, b) for a, b in pairwise((0, *inner, count))]


def parts_of(costs: Sequence[float], ranges: Sequence[LayerRange]) -> list[float]:
    return [sum(costs[start:stop]) for start, stop in ranges]


def rank_of(costs: Sequence[float], ranges: Sequence[LayerRange]) -> tuple[object, ...]:
    """What a cut is judged by: the largest part, evenness, then short early parts."""
    parts = parts_of(costs, ranges)
    return max(parts), sum(part**2 for part in parts), [each.size for each in ranges]


@examples(300)
@given(costs_of_layers, st.data())
def test_the_cut_is_the_best_of_all_cuts(costs: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    found = plan_stages(costs, parts)
    best = min(cuts(len(costs), parts), key=lambda ranges: rank_of(costs, ranges))
    actual, wanted = rank_of(costs, found), rank_of(costs, best)
    assert actual == wanted
    assert [each.start for each in found[1:]] == [each.stop for each in found[:-1]]


@examples(150)
@given(st.integers(1, 6), st.data())
def test_every_stage_gets_a_transformer_layer_where_there_are_enough(
    num_blocks: int, data: st.DataObject
) -> None:
    before, after = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    blocks = LayerRange(before, before + num_blocks)
    count = before + num_blocks + after
    costs = data.draw(st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count))
    parts = data.draw(st.integers(1, num_blocks))
    found = plan_stages(costs, parts, blocks=blocks)
    held = [min(r.stop, blocks.stop) - max(r.start, blocks.start) for r in found]
    assert min(held) >= 1
    allowed = [
        max(parts_of(costs, ranges))
        for ranges in cuts(count, parts)
        if all(r.stop > blocks.start and r.start < blocks.stop for r in ranges)
    ]
    assert max(parts_of(costs, found)) == pytest.approx(min(allowed))


def test_a_heavy_head_takes_layers_from_its_stage() -> None:
    # embedding, 6 equal blocks, norm, and a head that costs two blocks
    costs = [0.0, *[1.0] * 6, 0.0, 2.0]
    found = plan_stages(costs, 4, blocks=LayerRange(1, 7))
    assert parts_of(costs, found) == [1, 2, 2, 3]  # the last has one block besides the head


def test_equal_layers_that_do_not_divide_are_fewer_on_early_stages() -> None:
    assert plan_stages([1.0] * 8, 3) == (LayerRange(0, 2), LayerRange(2, 5), LayerRange(5, 8))


def test_evenness_never_costs_a_larger_bottleneck() -> None:
    costs = [3.0, 3.0, 4.0, 1.0, 4.0]
    assert max(parts_of(costs, plan_stages(costs, 3))) == 6.0


def test_fewer_blocks_than_stages_still_leave_no_stage_empty() -> None:
    found = plan_stages([1.0] * 4, 4, blocks=LayerRange(1, 2))
    assert [each.size for each in found] == [1, 1, 1, 1]


def test_virtual_stages_are_dealt_out_in_turn() -> None:
    ranges = plan_stages([1.0] * 8, 2, num_chunks=2)
    assert [each.size for each in ranges] == [2, 2, 2, 2]
    assert ranges_of_stage(ranges, 0, 2) == (LayerRange(0, 2), LayerRange(4, 6))
    assert ranges_of_stage(ranges, 1, 2) == (LayerRange(2, 4), LayerRange(6, 8))


def test_costs_whose_sums_floats_would_round_are_added_exactly() -> None:
    found = [plan_stages([cost / 10 for cost in costs], 2) for costs in ([1, 2, 3], [3, 2, 1])]
    assert found == [(LayerRange(0, 2), LayerRange(2, 3)), (LayerRange(0, 1), LayerRange(1, 3))]


def test_a_large_model_is_planned_in_no_time() -> None:
    costs = [3.1, *[1.0 + (i % 7) / 100 for i in range(126)], 0.01, 2.9]
    found = plan_stages(costs, 16, num_chunks=3, blocks=LayerRange(1, 127))
    assert len(found) == 48
    assert max(parts_of(costs, found)) < 4.2


def test_huge_and_tiny_costs_are_cut_as_well() -> None:
    for unit in (1e-300, 1e300):
        found = plan_stages([unit, unit, 2 * unit], 2)
        assert found == (LayerRange(0, 2), LayerRange(2, 3))


def test_layers_that_all_cost_nothing_are_cut_too() -> None:
    assert plan_stages([0.0] * 3, 2) == (LayerRange(0, 1), LayerRange(1, 3))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_no_cost_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="a layer's cost is not a number from 0") as caught:
        plan_stages([1.0, bad], 2)
    assert str(bad) in str(caught.value.found)


def test_fewer_layers_than_virtual_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="fewer layers than pipeline stages") as caught:
        plan_stages([1.0] * 3, 2, num_chunks=2)
    assert "3 layers, --pipeline-model-parallel-size 2 x 2 virtual stages" in str(caught.value)
    assert "at least 4 layers" in caught.value.fix


# Counts of transformer layers.


def test_layers_are_shared_out_evenly_and_what_is_left_over_goes_to_the_middle() -> None:
    assert even_counts(8, 4) == (2, 2, 2, 2)
    assert even_counts(9, 4) == (2, 3, 2, 2)
    assert even_counts(11, 4) == (3, 3, 3, 2)
    assert even_counts(9, 2, num_chunks=2) == (2, 3, 2, 2)


def test_the_ends_may_have_other_counts() -> None:
    assert even_counts(10, 4, first=2, last=2) == (2, 3, 3, 2)
    assert even_counts(30, 4, last=6) == (8, 8, 8, 6)
    assert even_counts(12, 3, num_chunks=2, first=2) == (1, 3, 3, 1, 2, 2)
    assert even_counts(5, 2, first=3, last=2) == (3, 2)
    assert even_counts(5, 1, first=5) == (5,)


@pytest.mark.parametrize(
    ("blocks", "stages", "ends", "fix"),
    [
        (3, 4, {}, "at least 4 layers"),
        (6, 4, {"first": 5}, "at least 3 layers"),
        (6, 2, {"first": 3, "last": 2}, "--num-layers 5"),
        (4, 2, {"first": 3, "last": 2}, "--num-layers 5"),
    ],
)
def test_counts_that_do_not_fill_the_stages_are_refused(
    blocks: int, stages: int, ends: dict[str, int], fix: str
) -> None:
    with pytest.raises(ConfigError, match="the layers do not fill the pipeline stages") as caught:
        even_counts(blocks, stages, **ends)
    assert fix in caught.value.fix
    for name, count in ends.items():
        assert f"--decoder-{name}-pipeline-num-layers {count}" in str(caught.value.found)


def test_one_stage_has_no_two_ends() -> None:
    with pytest.raises(ConfigError, match="one stage is both the first and the last"):
        even_counts(4, 1, first=2, last=2)


@pytest.mark.parametrize("count", [3, 1, 0])
def test_an_end_whose_chunks_would_be_unequal_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="cannot be shared out evenly over its virtual stages"):
        even_counts(11, 3, num_chunks=2, first=count)


def test_an_end_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be shared out evenly") as caught:
        even_counts(8, 4, last=0)
    assert "use 1 layers there" in caught.value.fix


def test_counts_may_be_listed_per_rank_or_per_virtual_stage() -> None:
    assert listed_counts([7, 8, 8, 7], 30, 4) == (7, 8, 8, 7)
    assert listed_counts([4, 2], 6, 2, num_chunks=2) == (2, 1, 2, 1)
    assert listed_counts([1, 2, 3, 4], 10, 2, num_chunks=2) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("counts", "chunks", "problem", "fix"),
    [
        ([4, 4, 2], 1, "are not one per pipeline stage", "give 2 of them"),
        ([4, 4, 2], 2, "are not one per pipeline stage", "give 2 or 4 (virtual stages)"),
        ([10, 0], 1, "a pipeline stage would have no layer", "one or more"),
        ([4, 5], 1, "do not add up to the layers of the model", "--num-layers 9"),
        ([5, 5], 2, "cannot be shared out evenly over its virtual stages", "use 4 layers"),
    ],
)
def test_listed_counts_that_do_not_fit_are_refused(
    counts: list[int], chunks: int, problem: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        listed_counts(counts, 10, 2, num_chunks=chunks)
    assert fix in caught.value.fix


def test_counts_become_ranges_with_what_stands_around_the_blocks() -> None:
    found = ranges_of_counts((2, 3, 1), ends=range(2, 8), num_layers=9)
    assert found == (LayerRange(0, 3), LayerRange(3, 6), LayerRange(6, 9))
    assert ranges_of_counts((4,), ends=range(2, 6), num_layers=7) == (LayerRange(0, 7),)


# Shared modules.


def test_a_tied_embedding_is_held_by_the_first_and_the_last_stage() -> None:
    tied = ["word", None, None, None, "word"]
    assert holders(tied, (LayerRange(0, 2), LayerRange(2, 3), LayerRange(3, 5))) == {"word": (0, 2)}
    assert holders(tied, (LayerRange(0, 5),)) == {"word": (0,)}


def test_modules_that_nobody_shares_are_not_listed() -> None:
    assert holders([None, None], (LayerRange(0, 1), LayerRange(1, 2))) == {}
