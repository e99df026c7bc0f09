"""One step of a pipeline stage as a value, and the arithmetic of virtual stages.

Neighbouring communication actions of a schedule are one batch: post all of them, in their order,
then wait for all. Posted one at a time, two stages that both send first wait for each other.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple


class ActionKind(StrEnum):
    """The kinds of a stage's actions."""

    RECV_FORWARD = "recv_forward"
    FORWARD = "forward"
    SEND_FORWARD = "send_forward"
    RECV_BACKWARD = "recv_backward"
    BACKWARD = "backward"  # the gradients of the input and of the weights together
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    SEND_BACKWARD = "send_backward"


SENDS = frozenset({ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD})
RECEIVES = frozenset({ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD})
COMMUNICATION = SENDS | RECEIVES


class Action(NamedTuple):
    """One action of a stage, for one micro-batch and one of its chunks.

    `chunk` counts the parts of the model that this stage holds, from 0, the acting stage's own,
    also where it sends or receives: chunk c of stage s is virtual stage c * num_stages + s, and
    virtual stages follow each other in the model. So what the last stage sends forward from its
    chunk c, stage 0 receives for its chunk c + 1; and what stage 0 sends backward from its chunk c,
    the last stage receives for its chunk c - 1.

    - `RECV_FORWARD` brings the input of the chunk, `RECV_BACKWARD` the gradient of its output.
    - `SEND_FORWARD` takes its output away, `SEND_BACKWARD` the gradient of its input. Afterwards
      neither is needed for sending.
    - The first virtual stage neither receives forward nor sends backward: it takes the batch. The
      last neither sends forward nor receives backward: it computes the loss.
    - `BACKWARD` computes both gradients. `BACKWARD_INPUT` computes what `SEND_BACKWARD` sends, and
      the `BACKWARD_WEIGHT` of the same micro-batch and chunk, later, the gradients of the weights.
    """

    kind: ActionKind
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}({self.microbatch}, chunk {self.chunk})"


Round = tuple[Action, ...]
"""Computations that a stage does without communicating in between."""

Schedule = tuple[Action, ...]
"""Everything that one stage does in one step, in order."""


class UnsoundScheduleError(Exception):
    """A schedule that cannot run: stages wait in a cycle, or work is missing. Always a bug."""


_NEEDED = {
    ActionKind.FORWARD: ActionKind.RECV_FORWARD,
    ActionKind.BACKWARD: ActionKind.RECV_BACKWARD,
    ActionKind.BACKWARD_INPUT: ActionKind.RECV_BACKWARD,
}


def needed(action: Action) -> Action | None:
    """Return the receiving of what a computation needs from another stage, if it needs anything.

    At the ends of the model there is no such action in a schedule.
    """
    kind = _NEEDED.get(action.kind)
    return None if kind is None else action._replace(kind=kind)


def virtual_stage(stage: int, chunk: int, num_stages: int) -> int:
    """Return the position in the model of one chunk of a stage, counted in chunks."""
    return chunk * num_stages + stage


def peer_of(action: Action, stage: int, num_stages: int) -> int:
    """Return the peer of `stage` in a communication action; stages form a ring."""
    towards_next = action.kind in (ActionKind.SEND_FORWARD, ActionKind.RECV_BACKWARD)
    return (stage + (1 if towards_next else -1)) % num_stages


def batches(schedule: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """Yield the steps of a schedule: a computation alone, or one batch of communication."""
    for communicates, run in groupby(schedule, key=lambda action: action.kind in COMMUNICATION):
        if communicates:
            yield tuple(run)
        else:
            yield from ((action,) for action in run)
