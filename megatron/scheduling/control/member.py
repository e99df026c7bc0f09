"""A rank that takes part in the transitions of an engine: a function from its state and an event.

A member does in PREPARE what can be undone, and nothing else before COMMIT. Messages to another
incarnation of it, of an older coordinator, or of a transition that has ended change nothing.
"""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from megatron.scheduling.control.messages import (
    Ack,
    Decide,
    Dismissed,
    Failed,
    Hello,
    Joined,
    Lease,
    Message,
    Nack,
    Phase,
    Prepare,
    RequestAbort,
    RequestStart,
    ToMember,
    Welcome,
)
from megatron.scheduling.control.states import EDGES, Code, ServingState


class TaskKind(StrEnum):
    """What the engine of a member has to do."""

    PREPARE = "prepare"  # begin the part of a transition that can be undone; then PrepareDone
    APPLY = "apply"  # make the transition that was prepared
    UNDO = "undo"  # undo what was prepared
    RESET = "reset"  # end all requests and free all blocks: the rank takes part no more


class EngineTask(NamedTuple):
    """TaskKind of the engine; `prepare` says for which transition, and is None for RESET.

    `detail` says why a rank is reset.
    """

    kind: TaskKind
    prepare: Prepare | None = None
    detail: str = ""


class PrepareDone(NamedTuple):
    """The engine has prepared a transition; with a code, it could not, and has undone it."""

    epoch: int
    code: str = ""
    detail: str = ""


class JoinRequest(NamedTuple):
    """The rank wants to take part, has no answer yet, or has another connection."""


class LeaseEnded(NamedTuple):
    """The coordinator has not been heard for so long that it may have removed this rank."""


class EngineFailure(NamedTuple):
    """The engine of this rank cannot compute any more."""

    detail: str


MemberEvent = ToMember | PrepareDone | JoinRequest | LeaseEnded | EngineFailure


@dataclass(frozen=True, slots=True)
class MemberState:
    """All that a member knows.

    Attributes:
        member: its rank.
        incarnation: larger with each start of the process and each reset.
        term: of the newest coordinator that it has heard.
        is_member: whether the coordinator has shown that it counts on this rank.
        is_fenced: whether the lease is over: it finishes its step and admits nothing.
        state: its stable state.
        epoch: of the newest transition that it committed or rolled back.
        committed: of the newest transition that it committed.
        weights: version of the weights.
        prepared: the transition that it has begun to prepare.
        is_ready: whether that is done.
        refusal: what it answered to a transition that it cannot make.
    """

    member: int
    incarnation: int
    term: int = 0
    is_member: bool = False
    is_fenced: bool = False
    state: ServingState = ServingState.LOADING
    epoch: int = 0
    committed: int = 0
    weights: int = 0
    prepared: Prepare | None = None
    is_ready: bool = False
    refusal: Nack | None = None

    @property
    def admits(self) -> bool:
        """Whether the engine may start requests."""
        is_running = self.state is ServingState.RUNNING and self.prepared is None
        return self.is_member and not self.is_fenced and is_running


class MemberStep(NamedTuple):
    """What an event leads to: a state, messages to the coordinator, work of the engine."""

    state: MemberState
    messages: tuple[Message, ...] = ()
    tasks: tuple[EngineTask, ...] = ()


def take_part(state: MemberState, event: MemberEvent) -> MemberStep:
    """Return what an event leads to."""
    match event:
        case JoinRequest():
            return MemberStep(state, (Hello(state.member, state.incarnation),))
        case LeaseEnded():
            return MemberStep(dataclasses.replace(state, is_fenced=state.is_member))
        case EngineFailure(detail):
            failed = dataclasses.replace(state, state=ServingState.FAILED, prepared=None)
            return MemberStep(failed, (Failed(state.member, state.incarnation, detail),))
        case PrepareDone():
            return _prepare_done(state, event)
    is_own = (event.member, event.incarnation) == (state.member, state.incarnation)
    if not is_own or event.term < state.term:
        return MemberStep(state)
    is_successor = event.term > state.term
    state = dataclasses.replace(state, term=event.term)
    match event:
        case Welcome() if state.is_member and is_successor:
            return _dismissed(state, "a new coordinator knows nothing of its requests")
        case Welcome():
            return _welcome(state, event)
        case Dismissed():
            return _dismissed(state, event.reason)
        case Prepare():
            return _prepare(_counted_on(state), event)
        case Decide():
            return _decide(_counted_on(state), event)
        case Lease() | RequestStart() | RequestAbort():
            return MemberStep(_counted_on(state))


def _counted_on(state: MemberState) -> MemberState:
    return dataclasses.replace(state, is_member=True, is_fenced=False)


def _welcome(state: MemberState, welcome: Welcome) -> MemberStep:
    if state.is_member or welcome.epoch < state.epoch:
        return MemberStep(state)  # an old copy: it takes part already, or has a newer one
    state = dataclasses.replace(
        state, state=welcome.state, epoch=welcome.epoch, weights=welcome.weights
    )
    return MemberStep(state, (Joined(state.member, state.incarnation, state.epoch),))


def _dismissed(state: MemberState, reason: str) -> MemberStep:
    """Begin again as another incarnation, which has no requests."""
    undo = () if state.prepared is None else (EngineTask(TaskKind.UNDO, state.prepared),)
    fresh = MemberState(state.member, state.incarnation + 1, term=state.term)
    return MemberStep(fresh, (), (*undo, EngineTask(TaskKind.RESET, detail=reason)))


def _prepare(state: MemberState, prepare: Prepare) -> MemberStep:
    newest = max(state.epoch, state.prepared.epoch if state.prepared is not None else 0)
    if state.prepared == prepare:
        return MemberStep(state, (_ack(state, prepare.epoch, Phase.PREPARE),) * state.is_ready)
    if state.refusal is not None and state.refusal.epoch == prepare.epoch:
        return MemberStep(state, (state.refusal,))
    if prepare.epoch <= newest:
        return MemberStep(state)
    undo = () if state.prepared is None else (EngineTask(TaskKind.UNDO, state.prepared),)
    if state.state not in EDGES[prepare.transition].sources:
        detail = f"{prepare.transition} does not begin in {state.state}"
        refused = _refused(state, prepare.epoch, Code.WRONG_STATE, detail)
        return refused._replace(tasks=undo)
    state = dataclasses.replace(state, prepared=prepare, is_ready=False, refusal=None)
    return MemberStep(state, (), (*undo, EngineTask(TaskKind.PREPARE, prepare)))


def _prepare_done(state: MemberState, done: PrepareDone) -> MemberStep:
    if state.prepared is None or state.prepared.epoch != done.epoch:
        return MemberStep(state)  # of a transition that has been undone meanwhile
    if done.code:
        return _refused(state, done.epoch, done.code, done.detail)
    state = dataclasses.replace(state, is_ready=True)
    return MemberStep(state, (_ack(state, done.epoch, Phase.PREPARE),))


def _refused(state: MemberState, epoch: int, code: str, detail: str) -> MemberStep:
    refusal = Nack(state.member, state.incarnation, epoch, code, detail)
    state = dataclasses.replace(state, prepared=None, is_ready=False, refusal=refusal)
    return MemberStep(state, (refusal,))


def _decide(state: MemberState, decide: Decide) -> MemberStep:
    epoch, prepared = decide.epoch, state.prepared
    if decide.phase is Phase.ROLLBACK:
        tasks: tuple[EngineTask, ...] = ()
        if prepared is not None and prepared.epoch <= epoch:  # of a superseded transition too
            tasks = (EngineTask(TaskKind.UNDO, prepared),)
            state = dataclasses.replace(state, prepared=None, is_ready=False)
        if epoch > state.epoch:
            state = dataclasses.replace(state, epoch=epoch, refusal=None)
        return MemberStep(state, (_ack(state, epoch, Phase.ROLLBACK),), tasks)
    if prepared is not None and prepared.epoch == epoch and state.is_ready:
        state = dataclasses.replace(
            state,
            state=prepared.target,
            weights=prepared.weights,
            epoch=epoch,
            committed=epoch,
            prepared=None,
            is_ready=False,
        )
        return MemberStep(
            state, (_ack(state, epoch, Phase.COMMIT),), (EngineTask(TaskKind.APPLY, prepared),)
        )
    if epoch == state.committed:
        return MemberStep(state, (_ack(state, epoch, Phase.COMMIT),))
    return MemberStep(state)


def _ack(state: MemberState, epoch: int, phase: Phase) -> Ack:
    return Ack(state.member, state.incarnation, epoch, phase)
