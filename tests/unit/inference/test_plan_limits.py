"""A plan that no model and no pool could execute is refused before anything is computed."""

from dataclasses import replace

import pytest

from megatron.errors import MegatronError
from megatron.inference.plan_limits import PlanLimits, check_plan
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice

LIMITS = PlanLimits(blocks=4, block_size=4, vocabulary=50, positions=12)
FIRST = SequenceSlice(7, (1, 2, 3), 2, (3, 0), True)
SECOND = SequenceSlice(8, (49,), 11, (3, 1, 2), True)  # shares block 3, which neither writes


def test_a_plan_within_its_limits_passes() -> None:
    first = replace(FIRST, start=4, blocks=(3, 0))
    check_plan(ForwardPlan(((0, 3),), (first, SECOND)), LIMITS)
    assert (first.end, SECOND.end) == (7, 12)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ForwardPlan((), ()), "has no tokens"),
        (ForwardPlan(((0, 4),), (FIRST,)), "a copy names a block that is not there"),
        (ForwardPlan((), (replace(FIRST, tokens=()),)), "a slice is empty"),
        (ForwardPlan((), (replace(FIRST, start=-1),)), "a slice is empty"),
        (ForwardPlan((), (replace(SECOND, start=12, blocks=(0, 1, 2, 3)),)), "last position"),
        (ForwardPlan((), (replace(FIRST, tokens=(50,)),)), "not in the vocabulary"),
        (ForwardPlan((), (replace(FIRST, targets=(50,)),)), "not in the vocabulary"),
        (ForwardPlan((), (replace(FIRST, targets=(1,) * 4),)), "asks for more log-probabilities"),
        (ForwardPlan((), (replace(FIRST, top_targets=51),)), "asks for more log-probabilities"),
        (ForwardPlan((), (replace(FIRST, prefix=4),)), "a slice has a part of its prefix"),
        (ForwardPlan((), (replace(FIRST, start=0, prefix=4),)), "a slice has a part of its prefix"),
        (ForwardPlan((), (replace(FIRST, blocks=(3,)),)), "a block table is too short"),
        (ForwardPlan((), (replace(FIRST, blocks=(3, 4)),)), "a slice names a block"),
        (ForwardPlan((), (FIRST, SECOND, FIRST)), "a sequence has two slices"),
        (ForwardPlan((), (FIRST, replace(FIRST, sequence=9))), "two sequences write one block"),
    ],
)
def test_a_plan_beyond_its_limits_is_an_internal_error(plan: ForwardPlan, message: str) -> None:
    with pytest.raises(MegatronError, match=f"internal error: .*{message}"):
        check_plan(plan, LIMITS)
