"""The leader's part of transitions: what pauses, drains, drops and stops, between two steps.

All of it runs in the thread of the engine, so that no step is under way. What a transition changes
on every rank is sent to the others through the log of the engine, in its place among the steps.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from megatron.errors import MegatronError, first_line
from megatron.scheduling.control.member import EngineTask, PrepareDone, TaskKind
from megatron.scheduling.control.messages import Prepare
from megatron.scheduling.control.states import EDGES, Code, Mode, ServingState, TransitionKind
from megatron.serving.ranks.rank_model import RankModel
from megatron.serving.ranks.round_log import RankTransition, RoundLog

_WITHOUT_REQUESTS = (TransitionKind.PAUSE, TransitionKind.STOP)


class ControlledEngine(Protocol):
    """What transitions do with an engine."""

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""

    def held_blocks(self) -> Sequence[int]:
        """Return the blocks of the cache whose content is needed later."""

    def show(self, state: str, *, takes_requests: bool) -> None:
        """Set what the engine is called, and whether requests may be submitted."""

    def abort_all(self, detail: str) -> None:
        """End all requests."""

    def drop_cache(self, weights_version: int | None) -> None:
        """Forget all keys and values; the weights have a new version, unless it is None."""

    def end(self) -> None:
        """End the engine."""


class QueuedTransitions:
    """Whether an engine takes requests once it has done the tasks that are in its queue.

    Its rank acknowledges a start before the engine has come to it: requests that follow wait behind
    it in the same queue.
    """

    def __init__(self) -> None:
        self._state, self.takes_requests = ServingState.LOADING, False

    def add(self, task: EngineTask) -> None:
        """Note that a task was put into the queue."""
        if task.prepare is None:
            return
        if task.kind is TaskKind.APPLY:
            self._state = task.prepare.target
        ends = task.kind is TaskKind.PREPARE and task.prepare.transition in _WITHOUT_REQUESTS
        self.takes_requests = self._state is ServingState.RUNNING and not ends


class EngineTransitions:
    """The transitions of one engine.

    Args:
        model: what they change on this rank; None: nothing.
        report: gets what became of each preparation.

    Attributes:
        is_held: whether no step is computed.
        settled_epoch: the newest transition that this engine has made, undone or refused. Members
            acknowledge a decision before their engine has come to it.
    """

    def __init__(
        self,
        engine: ControlledEngine,
        ranks: RoundLog,
        model: RankModel | None,
        report: Callable[[PrepareDone], None],
    ) -> None:
        self._engine, self._ranks, self._model, self._report = engine, ranks, model, report
        self._state = ServingState.LOADING
        self.is_held, self.settled_epoch = False, 0
        self._draining: Prepare | None = None

    def take(self, task: EngineTask) -> None:
        """Do what a member of the control plane asks its engine for."""
        if task.prepare is None:  # a reset, which ends the engine from outside
            return
        if task.kind is TaskKind.PREPARE:
            self._prepare(task.prepare)
        elif task.kind is TaskKind.APPLY:
            self._on_all_ranks(TaskKind.APPLY, task.prepare)
            self._apply(task.prepare)
            self.settled_epoch = task.prepare.epoch
        else:
            self._undo(task.prepare)
            self.settled_epoch = task.prepare.epoch

    def poll(self) -> None:
        """Report that an engine is drained, once its requests have ended."""
        if self._draining is not None and not self._engine.unfinished:
            prepare, self._draining = self._draining, None
            self.is_held = True
            self._report(PrepareDone(prepare.epoch))

    def _prepare(self, prepare: Prepare) -> None:
        try:
            self._on_all_ranks(TaskKind.PREPARE, prepare)
        except Exception as error:
            if self._ranks.has_followers and not isinstance(error, MegatronError):
                raise  # the ranks are apart
            self._on_all_ranks(TaskKind.UNDO, prepare)
            self.settled_epoch = prepare.epoch
            self._report(PrepareDone(prepare.epoch, Code.REFUSED, first_line(error)))
            return
        if prepare.transition in _WITHOUT_REQUESTS:
            self._engine.show(EDGES[prepare.transition].shown, takes_requests=False)
            if prepare.mode is Mode.DRAIN and not self.is_held:
                self._draining = prepare
                self.poll()
                return
            self.is_held = True
        self._report(PrepareDone(prepare.epoch))

    def _undo(self, prepare: Prepare) -> None:
        self._on_all_ranks(TaskKind.UNDO, prepare)
        if prepare.transition in _WITHOUT_REQUESTS:
            self._draining = None
            is_running = self._state is ServingState.RUNNING
            self.is_held = not is_running
            self._engine.show(self._state, takes_requests=is_running)

    def _apply(self, prepare: Prepare) -> None:
        self._state = prepare.target
        match prepare.transition:
            case TransitionKind.STOP:
                self._engine.end()
                return
            case TransitionKind.START | TransitionKind.RESUME:
                self.is_held = False
            case TransitionKind.PAUSE if prepare.mode is Mode.ABORT:
                self._engine.abort_all("the engine was paused")
            case TransitionKind.SUSPEND if prepare.mode is Mode.DROP:
                self._engine.drop_cache(None)
            case TransitionKind.NEW_WEIGHTS:
                self._engine.drop_cache(prepare.weights)
        self._engine.show(self._state, takes_requests=self._state is ServingState.RUNNING)

    def _on_all_ranks(self, part: TaskKind, prepare: Prepare) -> None:
        self._ranks.send(RankTransition(part, prepare))
        if self._model is not None:
            self._model.do(part, prepare, self._engine.held_blocks())
