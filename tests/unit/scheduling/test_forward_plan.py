"""Tests of megatron.scheduling.forward_plan."""

import dataclasses

import pytest

from megatron.errors import MegatronError
from megatron.scheduling.forward_plan import (
    ForwardPlan,
    SequenceSlice,
    plan_digest,
    with_drafts,
)

SLICE = SequenceSlice(3, (5, 6), 4, (1, 2), samples=True)
PLAN = ForwardPlan(((0, 2),), (SLICE,))


def test_every_part_of_a_plan_is_in_its_digest() -> None:
    others = [
        ForwardPlan((), (SLICE,)),
        ForwardPlan(((2, 0),), (SLICE,)),
        ForwardPlan(((0, 2),), ()),
        ForwardPlan(((0, 2),), (SLICE, SLICE)),
        *(
            ForwardPlan(((0, 2),), (dataclasses.replace(SLICE, **{name: value}),))
            for name, value in {
                "sequence": 4,
                "tokens": (5,),
                "start": 5,
                "blocks": (1,),
                "samples": False,
                "prefix": 2,
                "drafts": 1,
                "targets": (6,),
                "top_targets": 1,
                "embeds": True,
            }.items()
        ),
        ForwardPlan(((0, 2),), (dataclasses.replace(SLICE, tokens=(5,), blocks=(6, 1, 2)),)),
    ]
    assert len({plan_digest(plan) for plan in (PLAN, *others)}) == 1 + len(others)
    assert plan_digest(PLAN) == plan_digest(ForwardPlan(((0, 2),), (dataclasses.replace(SLICE),)))


def test_the_digest_is_the_same_everywhere() -> None:
    assert plan_digest(PLAN).hex() == "b9fa971db02015dba25d756de60bbe89"


def test_tokens_of_a_plan_are_those_of_all_slices() -> None:
    assert ForwardPlan((), (SLICE, SLICE)).token_count == 4
    assert ForwardPlan().token_count == 0


def test_proposed_tokens_stand_behind_those_of_their_sequence_in_the_room_for_them() -> None:
    roomy = dataclasses.replace(SLICE, draft_room=2)
    other = dataclasses.replace(SLICE, sequence=4)
    plan = ForwardPlan(((0, 2),), (roomy, other))
    assert plan.token_count == 6
    found = with_drafts(plan, {3: [7]})
    assert found.copies == plan.copies
    first = dataclasses.replace(SLICE, tokens=(5, 6, 7), drafts=1)
    assert found.slices == (first, other)
    assert with_drafts(plan, {}).slices == (SLICE, other)  # no room is left over
    assert found.token_count == 5


def test_more_proposed_tokens_than_there_is_room_for_are_refused() -> None:
    plan = ForwardPlan((), (dataclasses.replace(SLICE, draft_room=1),))
    for drafts in ({3: (1, 2)}, {9: (1,)}):
        with pytest.raises(MegatronError, match="more tokens are proposed than a plan has room"):
            with_drafts(plan, drafts)
