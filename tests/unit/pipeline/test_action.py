"""Actions: what they are called, who is at their other end, and what is one batch."""

import pytest

from megatron.pipeline.action import Action, ActionKind, batches, peer_of, virtual_stage


def test_chunks_of_a_stage_are_every_p_th_part_of_the_model() -> None:
    found = [virtual_stage(stage, chunk, 3) for chunk in range(2) for stage in range(3)]
    assert found == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("kind", "stage", "peer"),
    [
        (ActionKind.SEND_FORWARD, 1, 2),
        (ActionKind.RECV_BACKWARD, 1, 2),
        (ActionKind.RECV_FORWARD, 1, 0),
        (ActionKind.SEND_BACKWARD, 1, 0),
        (ActionKind.SEND_FORWARD, 3, 0),  # to the next chunk of stage 0
        (ActionKind.SEND_BACKWARD, 0, 3),  # to the chunk before, of the last stage
    ],
)
def test_stages_stand_in_a_ring(kind: ActionKind, stage: int, peer: int) -> None:
    assert peer_of(Action(kind, 0, 0), stage, 4) == peer


def test_neighbouring_communication_is_one_batch_and_computations_stand_alone() -> None:
    kinds = [
        ActionKind.RECV_FORWARD,
        ActionKind.FORWARD,
        ActionKind.SEND_FORWARD,
        ActionKind.RECV_BACKWARD,
        ActionKind.BACKWARD_INPUT,
        ActionKind.BACKWARD_WEIGHT,
    ]
    found = list(batches([Action(kind, 0, 0) for kind in kinds]))
    assert [[action.kind for action in batch] for batch in found] == [
        [ActionKind.RECV_FORWARD],
        [ActionKind.FORWARD],
        [ActionKind.SEND_FORWARD, ActionKind.RECV_BACKWARD],
        [ActionKind.BACKWARD_INPUT],
        [ActionKind.BACKWARD_WEIGHT],
    ]


def test_an_action_is_read_as_what_it_does() -> None:
    assert str(Action(ActionKind.SEND_BACKWARD, 3, 1)) == "send_backward(3, chunk 1)"
