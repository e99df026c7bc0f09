"""Orders of computation, against the pictures in the papers they come from."""

from itertools import product

from megatron.pipeline.action import ActionKind
from megatron.pipeline.orders import (
    Order,
    forward_only,
    gpipe,
    interleaved,
    interleaved_warmup,
    microbatch_groups,
    one_at_a_time,
    one_forward_one_backward,
    zero_bubble,
)

LETTERS = {
    ActionKind.FORWARD: "F",
    ActionKind.BACKWARD: "B",
    ActionKind.BACKWARD_INPUT: "I",
    ActionKind.BACKWARD_WEIGHT: "W",
}


def spelled(order: Order) -> str:
    """`F0 B0`; rounds of several computations are joined by +, chunks after the first by a dot."""
    return " ".join(
        "+".join(
            f"{LETTERS[action.kind]}{action.microbatch}" + f".{action.chunk}" * (action.chunk > 0)
            for action in actions
        )
        for actions in order
    )


def test_without_a_pipeline_one_microbatch_is_done_before_the_next() -> None:
    assert spelled(one_at_a_time(2)) == "F0 B0 F1 B1"


def test_gpipe_does_all_forwards_first_and_adds_gradients_in_order() -> None:
    assert spelled(gpipe(3)) == "F0 F1 F2 B0 B1 B2"


def test_1f1b_warms_up_alternates_and_drains() -> None:
    found = [spelled(one_forward_one_backward(stage, 3, 4)) for stage in range(3)]
    assert found == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_with_fewer_microbatches_than_stages_is_gpipe_on_the_first_stage() -> None:
    assert one_forward_one_backward(0, 4, 2) == gpipe(2)


def test_zero_bubble_delays_weight_gradients_by_the_stage() -> None:
    found = [spelled(zero_bubble(stage, 3, 4)) for stage in range(3)]
    assert found == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_interleaving_goes_through_the_chunks_with_a_group_of_microbatches() -> None:
    # Figure 4 of arXiv 2104.04473 is this for 4 stages; these are 2, with chunks 0 and 1.
    assert spelled(interleaved(0, 2, 2, 2)) == "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"
    assert spelled(interleaved(1, 2, 4, 2)) == (
        "F0 F1 F0.1+B0.1 F1.1+B1.1 F2+B0 F3+B1 F2.1+B2.1 F3.1+B3.1 B2 B3"
    )


def test_evaluation_is_the_forwards_of_training() -> None:
    forwards = [a for actions in interleaved(1, 3, 7, 2) for a in actions]
    expected = [a for a in forwards if a.kind is ActionKind.FORWARD]
    assert [a for (a,) in forward_only(3, 7, 2)] == expected


def test_groups_hold_all_microbatches_and_are_no_shorter_than_the_stages() -> None:
    assert microbatch_groups(8, 4) == (4, 4)
    assert microbatch_groups(11, 4) == (6, 5)
    assert microbatch_groups(3, 4) == (3,)
    for p, m in product(range(1, 9), range(1, 33)):
        groups = microbatch_groups(m, p)
        assert sum(groups) == m
        assert min(groups) >= min(p, m)
        assert groups == tuple(sorted(groups, reverse=True))
        assert groups[0] - groups[-1] <= 1


def test_the_warmup_of_interleaving_is_megatrons() -> None:
    assert [interleaved_warmup(stage, 4, 8, 2) for stage in range(4)] == [10, 8, 6, 4]
    assert interleaved_warmup(0, 4, 4, 2) == 8  # no more than there are forwards


def test_every_order_does_each_computation_once_and_gradients_in_order() -> None:
    for p, m in product(range(1, 7), range(1, 10)):
        for stage in range(p):
            for order in (
                one_forward_one_backward(stage, p, m),
                zero_bubble(stage, p, m),
                *([interleaved(stage, p, m, 3)] if p > 1 else []),
            ):
                done = [action for actions in order for action in actions]
                assert len(done) == len(set(done))
                keys = {(action.kind, action.chunk) for action in done}
                for key in keys:
                    batch = [a.microbatch for a in done if (a.kind, a.chunk) == key]
                    assert batch == list(range(m))
