"""Tests of megatron.scheduling.forward_plan."""

import dataclasses

from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice, plan_digest

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
    assert plan_digest(PLAN).hex() == "c84a0354cbeb892e98e5055227bf4805"


def test_tokens_of_a_plan_are_those_of_all_slices() -> None:
    assert ForwardPlan((), (SLICE, SLICE)).token_count == 4
    assert ForwardPlan().token_count == 0
