"""States of an inference engine, the commands that change them, and all outcomes as a table."""

from dataclasses import dataclass
from enum import StrEnum


class ServingState(StrEnum):
    """A stable state: what an engine is in between two transitions."""

    LOADING = "loading"  # not all ranks have joined
    RUNNING = "running"
    PAUSED = "paused"  # keys and values are kept
    SUSPENDED = "suspended"  # they are elsewhere or dropped
    STOPPED = "stopped"
    FAILED = "failed"


class TransitionKind(StrEnum):
    """A change of all ranks from one stable state to another."""

    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    SUSPEND = "suspend"
    NEW_WEIGHTS = "new_weights"
    STOP = "stop"


class CommandKind(StrEnum):
    """What a client can ask for."""

    SUBMIT = "submit"
    ABORT = "abort"
    PAUSE = "pause"
    RESUME = "resume"
    SUSPEND = "suspend"
    NEW_WEIGHTS = "new_weights"
    STOP = "stop"
    STATUS = "status"


class Mode(StrEnum):
    """How a transition is made."""

    DEFAULT = ""
    FREEZE = "freeze"  # PAUSE: running requests keep their blocks
    DRAIN = "drain"  # PAUSE, STOP: running requests may end first
    ABORT = "abort"  # PAUSE: running requests are aborted
    KEEP = "keep"  # SUSPEND: keys and values stay where they are
    OFFLOAD = "offload"  # SUSPEND: they are copied to host memory
    DROP = "drop"  # SUSPEND: they are computed again
    NOW = "now"  # STOP: running requests are aborted


class Code(StrEnum):
    """What an answer says."""

    OK = "ok"
    ACCEPTED = "accepted"  # SUBMIT: the request has a place
    NOT_READY = "not_ready"  # the engine is loading
    PAUSED = "paused"
    STOPPING = "stopping"
    ENGINE_FAILED = "engine_failed"
    ENGINE_LOST = "engine_lost"  # every rank that could answer is gone
    NOT_FOUND = "not_found"
    WRONG_STATE = "wrong_state"
    BUSY = "transition_in_progress"
    SUPERSEDED = "superseded"  # STOP came before the transition was decided
    TIMEOUT = "timeout"  # ranks were silent; all are back in the state before
    REFUSED = "refused"  # a rank refused; all are back in the state before
    BAD_COMMAND = "bad_command"
    TOO_MANY = "too_many_requests"  # so many are being served that another one is refused


class Outcome(StrEnum):
    """What becomes of a command in a state."""

    START = "start"  # begin its transition
    JOIN = "join"  # wait for the same transition, which is being made; BUSY if it differs
    SUPERSEDE = "supersede"  # end the transition that is being made, unless it is decided
    ALREADY = "already"  # OK at once: nothing is done
    WRONG_STATE = "wrong_state"
    BUSY = "busy"
    ROUTE = "route"  # SUBMIT and ABORT: to the requests
    NOT_READY = "not_ready"
    PAUSED = "paused"
    STOPPING = "stopping"
    ENGINE_FAILED = "engine_failed"
    NOT_FOUND = "not_found"


@dataclass(frozen=True, slots=True)
class Edge:
    """What a transition changes.

    Attributes:
        sources: stable states in which it may begin.
        target: the stable state after it; None means the same.
        modes: how it may be made; the first is the default.
        shown: what the engine is called meanwhile.
    """

    sources: frozenset[ServingState]
    target: ServingState | None
    modes: tuple[Mode, ...]
    shown: str

    def target_from(self, state: ServingState) -> ServingState:
        """Return the state after the transition from `state`."""
        return state if self.target is None else self.target


_S = ServingState
EDGES: dict[TransitionKind, Edge] = {
    TransitionKind.START: Edge(frozenset({_S.LOADING}), _S.RUNNING, (Mode.DEFAULT,), "starting"),
    TransitionKind.PAUSE: Edge(
        frozenset({_S.RUNNING}), _S.PAUSED, (Mode.FREEZE, Mode.DRAIN, Mode.ABORT), "pausing"
    ),
    TransitionKind.RESUME: Edge(
        frozenset({_S.PAUSED, _S.SUSPENDED}), _S.RUNNING, (Mode.DEFAULT,), "resuming"
    ),
    TransitionKind.SUSPEND: Edge(
        frozenset({_S.PAUSED}), _S.SUSPENDED, (Mode.KEEP, Mode.OFFLOAD, Mode.DROP), "suspending"
    ),
    TransitionKind.NEW_WEIGHTS: Edge(
        frozenset({_S.PAUSED, _S.SUSPENDED}), None, (Mode.DEFAULT,), "updating"
    ),
    TransitionKind.STOP: Edge(
        frozenset({_S.LOADING, _S.RUNNING, _S.PAUSED, _S.SUSPENDED, _S.FAILED}),
        _S.STOPPED,
        (Mode.DRAIN, Mode.NOW),
        "stopping",
    ),
}

_COLUMNS = (
    CommandKind.SUBMIT,
    CommandKind.ABORT,
    CommandKind.PAUSE,
    CommandKind.RESUME,
    CommandKind.SUSPEND,
    CommandKind.NEW_WEIGHTS,
    CommandKind.STOP,
)
_ROWS = """
    loading    not_ready     not_found wrong_state wrong_state wrong_state wrong_state start
    running    route         route     start       already     wrong_state wrong_state start
    paused     paused        route     already     start       start       start       start
    suspended  paused        route     wrong_state start       already     start       start
    stopped    stopping      not_found wrong_state wrong_state wrong_state wrong_state already
    failed     engine_failed route     wrong_state wrong_state wrong_state wrong_state start
    starting   not_ready     not_found busy        busy        busy        busy        supersede
    pausing    paused        route     join        busy        busy        busy        supersede
    resuming   paused        route     busy        join        busy        busy        supersede
    suspending paused        route     busy        busy        join        busy        supersede
    updating   paused        route     busy        busy        busy        join        supersede
    stopping   stopping      route     wrong_state wrong_state wrong_state wrong_state join
"""
OUTCOMES: dict[tuple[str, CommandKind], Outcome] = {
    (state, command): Outcome(name)
    for state, *names in map(str.split, _ROWS.strip().splitlines())
    for command, name in zip(_COLUMNS, names, strict=True)
}


def outcome_of(shown: str, command: CommandKind) -> Outcome:
    """Return what becomes of a command while the engine is shown as `shown`.

    Args:
        shown: a stable state, or `Edge.shown` of the transition that is being made.
    """
    if command is CommandKind.STATUS:
        return Outcome.ALREADY
    return OUTCOMES[shown, command]
