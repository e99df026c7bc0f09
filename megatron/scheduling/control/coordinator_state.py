"""What a coordinator knows, what can happen to it, and what it sends: values that do not change."""

from dataclasses import dataclass
from typing import NamedTuple

from megatron.scheduling.control.messages import (
    Ack,
    Answer,
    Command,
    Failed,
    Heartbeat,
    Hello,
    Joined,
    Message,
    Nack,
    Phase,
    RankAnswer,
)
from megatron.scheduling.control.states import EDGES, Code, Mode, ServingState, TransitionKind

ROUTER = "router"  # where commands about requests go, once the state allows them


class ClientCommand(NamedTuple):
    """A command, and the connection that gets its answer."""

    client: str
    command: Command


class PrepareTimeout(NamedTuple):
    """The time in which members may prepare a transition is over."""

    epoch: int


class Resend(NamedTuple):
    """What members have not acknowledged is to be sent again."""

    epoch: int


class MemberLost(NamedTuple):
    """The lease of a member is over."""

    member: int


CoordinatorEvent = (
    ClientCommand
    | PrepareTimeout
    | Resend
    | MemberLost
    | Hello
    | Joined
    | Ack
    | Nack
    | Heartbeat
    | Failed
)


class Send(NamedTuple):
    """A message, and who gets it: a member by its rank, a client or ROUTER by name."""

    to: int | str
    message: "Message | ClientCommand"


@dataclass(frozen=True, slots=True)
class Transition:
    """The transition that is being made.

    Attributes:
        kind: what changes.
        epoch: its number.
        target: the state after it.
        mode: how it is made.
        weights: the version of the weights after it.
        remaining_ms: how long it may be prepared; 0 means the default.
        phase: what members are asked for.
        commands: who waits for its end.
        cancellers: who waits for its rollback.
        participants: members when it began.
        acks: members that have done the phase.
        refusals: members that refused, or were silent.
        failure: why it is rolled back.
        source: where new weights are.
    """

    kind: TransitionKind
    epoch: int
    target: ServingState
    mode: Mode
    weights: int
    remaining_ms: int
    phase: Phase
    commands: tuple[ClientCommand, ...]
    participants: frozenset[int]
    cancellers: tuple[ClientCommand, ...] = ()
    acks: frozenset[int] = frozenset()
    refusals: tuple[RankAnswer, ...] = ()
    failure: Code = Code.TIMEOUT
    source: str = ""


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """All that a coordinator knows.

    Attributes:
        term: larger than that of any coordinator before it.
        replicas: the replica of each rank; a replica without one of its ranks cannot compute.
        incarnations: the newest incarnation seen of each rank; -1 if none was.
        members: ranks that take part.
        joined: ranks that took the state of this epoch and wait for the rest of their replica.
        state: the newest that all members have acknowledged.
        epoch: of the newest transition, whatever became of it.
        weights: version of the weights.
        transition: the one that is being made.
        queued_stop: commands to stop that wait for the end of a decided transition.
        failed_start: which ranks the last start failed at; it is tried again.
        answers: the newest answers with their clients, for commands that are repeated.
    """

    term: int
    replicas: tuple[int, ...]
    incarnations: tuple[int, ...]
    members: frozenset[int] = frozenset()
    joined: frozenset[int] = frozenset()
    state: ServingState = ServingState.LOADING
    epoch: int = 0
    weights: int = 0
    transition: Transition | None = None
    queued_stop: tuple[ClientCommand, ...] = ()
    failed_start: str = ""
    answers: tuple[tuple[str, Answer], ...] = ()

    @property
    def shown(self) -> str:
        """What the engine is called: its state, or the transition that is being made."""
        return self.state if self.transition is None else EDGES[self.transition.kind].shown

    @property
    def missing(self) -> list[int]:
        """Ranks that do not take part."""
        return sorted(set(range(len(self.replicas))) - self.members)


def new_coordinator(
    replicas: tuple[int, ...], *, term: int = 1, weights: int = 0
) -> CoordinatorState:
    """Return a coordinator that waits for all ranks; see `CoordinatorState.replicas`."""
    return CoordinatorState(term, replicas, (-1,) * len(replicas), weights=weights)
