"""The coordinator of an engine: a function from its state and an event to a state and messages.

A transition is prepared by all members, then committed or rolled back by all; the state changes
when all have acknowledged, never when a message is sent. There is no clock: that a time is over is
an event. Any message in any state has an outcome.
"""

import dataclasses
from collections.abc import Iterable

from megatron.scheduling.control.coordinator_state import (
    ROUTER,
    ClientCommand,
    CoordinatorEvent,
    CoordinatorState,
    MemberLost,
    PrepareTimeout,
    Resend,
    Send,
    Transition,
)
from megatron.scheduling.control.messages import (
    Ack,
    Answer,
    Command,
    Decide,
    Dismissed,
    Failed,
    Heartbeat,
    Hello,
    Joined,
    Lease,
    Message,
    Nack,
    Phase,
    Prepare,
    RankAnswer,
    Welcome,
)
from megatron.scheduling.control.states import (
    EDGES,
    Code,
    CommandKind,
    Mode,
    Outcome,
    ServingState,
    TransitionKind,
    outcome_of,
)

REMEMBERED_ANSWERS = 1024
MAX_WAITING_COMMANDS = 1024

_TRANSITIONS = {
    CommandKind.PAUSE: TransitionKind.PAUSE,
    CommandKind.RESUME: TransitionKind.RESUME,
    CommandKind.SUSPEND: TransitionKind.SUSPEND,
    CommandKind.NEW_WEIGHTS: TransitionKind.NEW_WEIGHTS,
    CommandKind.STOP: TransitionKind.STOP,
}
_CODES = {
    Outcome.WRONG_STATE: Code.WRONG_STATE,
    Outcome.BUSY: Code.BUSY,
    Outcome.NOT_READY: Code.NOT_READY,
    Outcome.PAUSED: Code.PAUSED,
    Outcome.STOPPING: Code.STOPPING,
    Outcome.ENGINE_FAILED: Code.ENGINE_FAILED,
    Outcome.NOT_FOUND: Code.NOT_FOUND,
    Outcome.ALREADY: Code.OK,
}


def coordinate(
    state: CoordinatorState, event: CoordinatorEvent
) -> tuple[CoordinatorState, tuple[Send, ...]]:
    """Return the state after an event, and what is to be sent."""
    step = _Step(state)
    step.take(event)
    return step.state, tuple(step.sent)


class _Step:
    """One event: the state so far, and the messages so far."""

    def __init__(self, state: CoordinatorState) -> None:
        self.state = state
        self.sent: list[Send] = []

    def take(self, event: CoordinatorEvent) -> None:
        match event:
            case ClientCommand():
                self._command(event)
            case PrepareTimeout(epoch):
                self._prepare_timeout(epoch)
            case Resend(epoch):
                if self.state.transition is not None and self.state.transition.epoch == epoch:
                    self._send_phase(self.state.transition)
            case MemberLost(member):
                if member in self.state.members:
                    self._lose(member, ServingState.LOADING)
            case Hello():
                self._hello(event)
            case _ if not self._is_current(event):
                self._answer_stranger(event)
            case Joined():
                self._joined(event)
            case Heartbeat():
                self._heartbeat(event)
            case Failed():
                if event.member in self.state.members:
                    self._lose(event.member, ServingState.FAILED)
            case Ack() | Nack():
                self._acknowledged(event)

    def _change(self, **changes: object) -> None:
        self.state = dataclasses.replace(self.state, **changes)  # type: ignore[arg-type]

    def _change_transition(self, transition: Transition, **changes: object) -> Transition:
        changed = dataclasses.replace(transition, **changes)  # type: ignore[arg-type]
        self._change(transition=changed)
        return changed

    # Commands of clients

    def _command(self, asked: ClientCommand) -> None:
        command = asked.command
        for client, answer in self.state.answers:
            if (client, answer.id) == (asked.client, command.id):
                self.sent.append(Send(client, answer))
                return
        if self._is_waiting(asked):
            return
        if (problem := self._problem(command)) is not None:
            self._answer(asked, Code.BAD_COMMAND, problem)
            return
        outcome = outcome_of(self.state.shown, command.command)
        if outcome is Outcome.ROUTE:
            self.sent.append(Send(ROUTER, asked))
        elif outcome is Outcome.START:
            self._begin(_TRANSITIONS[command.command], (asked,))
        elif outcome is Outcome.JOIN:
            self._join(asked)
        elif outcome is Outcome.SUPERSEDE:
            self._supersede(asked)
        elif outcome is Outcome.BUSY and command.cancel and self._can_cancel(command):
            self._cancel(asked)
        else:
            self._answer(asked, _CODES[outcome], self._status_detail(), self._ranks_present())

    def _is_waiting(self, asked: ClientCommand) -> bool:
        transition = self.state.transition
        waiting = (*self.state.queued_stop,)
        if transition is not None:
            waiting += (*transition.commands, *transition.cancellers)
        same = (asked.client, asked.command.id)
        return any((one.client, one.command.id) == same for one in waiting)

    def _problem(self, command: Command) -> str | None:
        kind = _TRANSITIONS.get(command.command)
        if kind is not None and command.mode not in (Mode.DEFAULT, *EDGES[kind].modes):
            return f"{command.command} has no mode {command.mode}"
        if command.remaining_ms < 0:
            return "its time is over"
        if command.command is CommandKind.NEW_WEIGHTS and command.weights <= self.state.weights:
            return f"weights {command.weights} are not newer than {self.state.weights}"
        return None

    def _status_detail(self) -> str:
        missing = self.state.missing
        if missing:
            return f"ranks {', '.join(map(str, missing))} are missing"
        return f"the start failed: {self.state.failed_start}" if self.state.failed_start else ""

    def _ranks_present(self) -> tuple[RankAnswer, ...]:
        return tuple(
            RankAnswer(rank, "member" if rank in self.state.members else "missing")
            for rank in range(len(self.state.replicas))
        )

    def _join(self, asked: ClientCommand) -> None:
        transition, command = self._transition(), asked.command
        mode = command.mode or EDGES[transition.kind].modes[0]
        is_stop = transition.kind is TransitionKind.STOP
        is_same = command.command is not CommandKind.NEW_WEIGHTS or (
            (command.weights, command.source) == (transition.weights, transition.source)
        )
        if not (is_stop or (mode is transition.mode and is_same)):
            self._answer(asked, Code.BUSY, f"{transition.kind} {transition.mode} is being made")
        elif len(transition.commands) >= MAX_WAITING_COMMANDS:
            self._answer(asked, Code.BUSY, f"{len(transition.commands)} commands wait for its end")
        elif is_stop and mode is Mode.NOW is not transition.mode and self._is_undecided():
            self._change(transition=None)
            self._begin(TransitionKind.STOP, (*transition.commands, asked))
        else:
            self._change_transition(transition, commands=(*transition.commands, asked))

    def _supersede(self, asked: ClientCommand) -> None:
        transition = self._transition()
        if not self._is_undecided():
            self._change(queued_stop=(*self.state.queued_stop, asked)[-MAX_WAITING_COMMANDS:])
            return
        self._change(transition=None)
        for waiting in transition.commands:
            self._answer(waiting, Code.SUPERSEDED, "the engine is stopped", epoch=transition.epoch)
        self._begin(TransitionKind.STOP, (asked,))

    def _can_cancel(self, command: Command) -> bool:
        is_pause = self._transition().kind is TransitionKind.PAUSE
        return command.command is CommandKind.RESUME and is_pause and self._is_undecided()

    def _cancel(self, asked: ClientCommand) -> None:
        transition = self._change_transition(
            self._transition(), cancellers=(asked,), failure=Code.SUPERSEDED
        )
        self._roll_back(transition)

    # Transitions

    def _transition(self) -> Transition:
        transition = self.state.transition
        assert transition is not None  # noqa: S101  # invariant: its callers have seen one
        return transition

    def _is_undecided(self) -> bool:
        return self._transition().phase is Phase.PREPARE

    def _begin(self, kind: TransitionKind, commands: tuple[ClientCommand, ...]) -> None:
        edge, epoch = EDGES[kind], self.state.epoch + 1
        asked = [one.command for one in commands]
        modes = [one.mode for one in asked]
        weights = [one.weights for one in asked if kind is TransitionKind.NEW_WEIGHTS]
        transition = Transition(
            kind=kind,
            epoch=epoch,
            target=edge.target_from(self.state.state),
            mode=Mode.NOW if Mode.NOW in modes else next(filter(None, modes), edge.modes[0]),
            weights=max(weights, default=self.state.weights),
            remaining_ms=max((one.remaining_ms for one in asked), default=0),
            phase=Phase.PREPARE,
            commands=commands,
            participants=self.state.members,
            source=next((one.source for one in asked if one.source), ""),
        )
        self._change(epoch=epoch, transition=transition, joined=frozenset())
        self._send_phase(transition)
        self._advance()

    def _send_phase(self, transition: Transition) -> None:
        term = self.state.term
        for member in sorted(self.state.members - transition.acks):
            incarnation = self.state.incarnations[member]
            message: Message = Decide(term, member, incarnation, transition.epoch, transition.phase)
            if transition.phase is Phase.PREPARE:
                message = Prepare(
                    term,
                    member,
                    incarnation,
                    transition.epoch,
                    transition.kind,
                    transition.target,
                    transition.mode,
                    transition.weights,
                    transition.remaining_ms,
                    transition.source,
                )
            self.sent.append(Send(member, message))

    def _acknowledged(self, message: Ack | Nack) -> None:
        transition = self.state.transition
        if transition is None or transition.epoch != message.epoch:
            return  # late: of a transition that has ended
        if isinstance(message, Ack):
            if message.phase is transition.phase:
                acks = transition.acks | {message.member}
                self._change_transition(transition, acks=acks)
                self._advance()
        elif transition.phase is Phase.PREPARE:
            refusal = RankAnswer(message.member, message.code, message.detail)
            transition = self._change_transition(
                transition, refusals=(*transition.refusals, refusal), failure=Code.REFUSED
            )
            self._roll_back(transition)

    def _prepare_timeout(self, epoch: int) -> None:
        transition = self.state.transition
        if transition is None or transition.epoch != epoch or not self._is_undecided():
            return
        silent = sorted(self.state.members - transition.acks)
        refusals = tuple(RankAnswer(member, "silent") for member in silent)
        self._roll_back(
            self._change_transition(transition, refusals=(*transition.refusals, *refusals))
        )

    def _roll_back(self, transition: Transition) -> None:
        transition = self._change_transition(transition, phase=Phase.ROLLBACK, acks=frozenset())
        self._send_phase(transition)
        self._advance()

    def _advance(self) -> None:
        """Go on to the next phase, or to the end, if all members have acknowledged."""
        transition = self.state.transition
        if transition is None or not self.state.members <= transition.acks:
            return
        if transition.phase is Phase.PREPARE:
            transition = self._change_transition(transition, phase=Phase.COMMIT, acks=frozenset())
            self._send_phase(transition)
            self._advance()
            return
        self._change(transition=None)
        if transition.phase is Phase.COMMIT:
            self._change(state=transition.target, weights=transition.weights, failed_start="")
            self._answer_all(transition, Code.OK)
        else:
            if transition.kind is TransitionKind.START:
                self._change(failed_start=_what_failed(self._ranks_of(transition)))
            self._answer_all(transition, transition.failure)
        self._start_queued_stop()

    def _start_queued_stop(self) -> None:
        if self.state.queued_stop and self.state.transition is None:
            commands = self.state.queued_stop
            self._change(queued_stop=())
            self._begin(TransitionKind.STOP, commands)

    # Members

    def _is_current(self, message: Joined | Ack | Nack | Heartbeat | Failed) -> bool:
        known = self.state.incarnations
        return 0 <= message.member < len(known) and known[message.member] == message.incarnation

    def _answer_stranger(self, message: Joined | Ack | Nack | Heartbeat | Failed) -> None:
        if isinstance(message, Heartbeat):
            self._dismiss(message.member, message.incarnation, "this process is no member")

    def _dismiss(self, member: int, incarnation: int, reason: str) -> None:
        self.sent.append(Send(member, Dismissed(self.state.term, member, incarnation, reason)))

    def _hello(self, hello: Hello) -> None:
        member, incarnation = hello.member, hello.incarnation
        if not 0 <= member < len(self.state.replicas):
            ranks = len(self.state.replicas)
            self._dismiss(member, incarnation, f"there is no rank {member} of {ranks}")
            return
        newest = self.state.incarnations[member]
        if incarnation < newest:
            self._dismiss(member, incarnation, "a newer process has this rank")
            return
        if incarnation > newest:
            if member in self.state.members:
                self._lose(member, ServingState.LOADING)
            incarnations = list(self.state.incarnations)
            incarnations[member] = incarnation
            joined = self.state.joined - {member}
            self._change(incarnations=tuple(incarnations), joined=joined)
        if member in self.state.members:
            self._lease(member)
        elif self.state.state in (ServingState.STOPPED, ServingState.FAILED):
            self._dismiss(member, incarnation, f"the engine is {self.state.state}")
        elif self.state.transition is None:  # else it says so again
            state, epoch, weights = self.state.state, self.state.epoch, self.state.weights
            welcome = Welcome(self.state.term, member, incarnation, state, epoch, weights)
            self.sent.append(Send(member, welcome))

    def _joined(self, message: Joined) -> None:
        if message.member in self.state.members or message.epoch != self.state.epoch:
            return
        if self.state.transition is not None:
            return
        joined = self.state.joined | {message.member}
        replica = self._replica_of(message.member)
        if replica <= joined:
            self._change(members=self.state.members | replica, joined=joined - replica)
            for member in sorted(replica):
                self._lease(member)
        else:
            self._change(joined=joined)
        self._start_if_complete()

    def _start_if_complete(self) -> None:
        is_idle = self.state.transition is None and self.state.state is ServingState.LOADING
        if is_idle and not self.state.missing:
            self._begin(TransitionKind.START, ())

    def _replica_of(self, member: int) -> frozenset[int]:
        replica = self.state.replicas[member]
        return frozenset(rank for rank, other in enumerate(self.state.replicas) if other == replica)

    def _lease(self, member: int) -> None:
        incarnation = self.state.incarnations[member]
        self.sent.append(Send(member, Lease(self.state.term, member, incarnation)))

    def _heartbeat(self, message: Heartbeat) -> None:
        if message.member not in self.state.members:
            self._dismiss(message.member, message.incarnation, "this process is no member")
        elif message.state is ServingState.FAILED:
            self._lose(message.member, ServingState.FAILED)
        else:
            self._lease(message.member)
            self._start_if_complete()

    def _lose(self, member: int, if_last: ServingState) -> None:
        """Remove a member, and the others of its replica, which cannot compute without it."""
        lost = self._replica_of(member) & self.state.members
        self._change(members=self.state.members - lost)
        for other in sorted(lost):
            reason = f"rank {member} of its replica is lost"
            self._dismiss(other, self.state.incarnations[other], reason)
        transition = self.state.transition
        if self.state.members:
            self._advance()
            return
        if transition is not None and transition.kind is TransitionKind.STOP:
            self._change_transition(transition, phase=Phase.COMMIT)
            self._advance()
            return
        self._change(transition=None)
        if self.state.state is not ServingState.STOPPED:  # a new epoch: no rank has this state yet
            self._change(state=if_last, epoch=self.state.epoch + 1, joined=frozenset())
        if transition is not None:
            self._answer_all(transition, Code.ENGINE_LOST)
        self._start_queued_stop()

    # Answers

    def _answer_all(self, transition: Transition, code: Code) -> None:
        ranks = self._ranks_of(transition)
        detail = _what_failed(ranks)
        for waiting in transition.commands:
            self._answer(waiting, code, detail, ranks, epoch=transition.epoch)
        is_back = code is transition.failure and transition.phase is Phase.ROLLBACK
        for waiting in transition.cancellers:
            self._answer(waiting, Code.OK if is_back else code, detail, ranks)

    def _ranks_of(self, transition: Transition) -> list[RankAnswer]:
        refusals = {one.member: one for one in transition.refusals}
        members = self.state.members
        return [
            refusals.get(rank, RankAnswer(rank, "ack" if rank in members else "lost"))
            for rank in sorted(transition.participants)
        ]

    def _answer(
        self,
        asked: ClientCommand,
        code: Code,
        detail: str = "",
        ranks: Iterable[RankAnswer] = (),
        *,
        epoch: int | None = None,
    ) -> None:
        number = self.state.epoch if epoch is None else epoch
        answer = Answer(asked.command.id, code, self.state.shown, number, detail, tuple(ranks))
        self.sent.append(Send(asked.client, answer))
        if asked.command.command is not CommandKind.STATUS:
            answers = (*self.state.answers, (asked.client, answer))
            self._change(answers=answers[-REMEMBERED_ANSWERS:])


def _what_failed(ranks: Iterable[RankAnswer]) -> str:
    return ", ".join(
        f"rank {one.member}: {one.verdict}{one.detail and f' ({one.detail})'}"
        for one in ranks
        if one.verdict != "ack"
    )
