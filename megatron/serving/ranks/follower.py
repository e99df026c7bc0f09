"""A rank that executes the steps that another one schedules, until it is told to stop.

It repeats the scheduler's decisions and compares the plans before it computes (`replay`). It draws
no tokens: those of the leader come with the next round. It looks at no clock.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from megatron import log
from megatron.errors import MegatronError, first_line
from megatron.scheduling.control.member import PrepareDone, TaskKind
from megatron.scheduling.control.messages import Prepare
from megatron.scheduling.control.states import Code
from megatron.scheduling.forward_plan import ForwardPlan
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.replay import FollowingScheduler, RoundRecord, StepFailure
from megatron.scheduling.scheduler import Scheduler
from megatron.serving.ranks.rank_model import RankModel
from megatron.serving.ranks.round_log import (
    EngineEnd,
    EngineStep,
    RankCall,
    RankMessage,
    RankTransition,
    is_found_alike,
)


class StepScorer(Protocol):
    """What computes a step without drawing, such as `inference.forward.ForwardExecutor`."""

    def scores(self, plan: ForwardPlan) -> Tensor: ...


class Follower:
    """One rank.

    Args:
        scorer: the model's part of this rank.
        limits: those of the leader's scheduler.
        functions: what the leader may call on all ranks, by name.
        receive: returns the next message of the log.
        model: what transitions change on this rank; None: nothing.
        report: gets what became of each preparation.
    """

    def __init__(
        self,
        scorer: StepScorer,
        limits: SchedulerLimits,
        *,
        functions: Mapping[str, Callable[..., object]],
        receive: Callable[[], RankMessage],
        model: RankModel | None = None,
        report: Callable[[PrepareDone], None] = lambda done: None,
    ) -> None:
        self._model, self.report = model, report
        self._scorer, self._functions, self._receive = scorer, functions, receive
        self._scheduler = Scheduler(limits)
        self._following = FollowingScheduler(self._scheduler)
        self._error: Exception | None = None  # of the step before, which the leader has to know of

    def run(self) -> str:
        """Follow until the leader stops; return why it did.

        Raises:
            ReplayError: a record is missing, or the plans differ.
            MegatronError: an error of a step that the leader did not find.
            Exception: whatever a step raises that not all ranks find alike.
        """
        while True:
            match self._receive():
                case EngineEnd(detail):
                    return detail
                case RankCall(name, arguments):
                    self._attempt(lambda: self._functions[name](*arguments))
                    self._error = None  # the leader's request fails alike
                case RankTransition(part, prepare):
                    self._take_part(part, prepare)
                case EngineStep(record):
                    self._follow(record)

    def _follow(self, record: RoundRecord) -> None:
        has_failed = any(isinstance(each, StepFailure) for each in record.commands)
        if self._error is not None and not has_failed:
            raise MegatronError(
                "a step failed on this rank, and not on the one that schedules",
                found=f"round {record.round - 1}: {first_line(self._error)}",
                fix="start the ranks of this engine again; report this as a bug",
            ) from self._error
        self._error = None
        plan = self._following.follow(record)
        self._scheduler.take_ended()
        self._scheduler.take_preemptions()
        if plan.slices:
            self._attempt(lambda: self._scorer.scores(plan))

    def _take_part(self, part: TaskKind, prepare: Prepare) -> None:
        done = PrepareDone(prepare.epoch)
        try:
            if self._model is not None:
                self._model.do(part, prepare, self._scheduler.pool.held)
        except MegatronError as error:
            if part is not TaskKind.PREPARE:
                raise
            done = PrepareDone(prepare.epoch, Code.REFUSED, first_line(error))
        if part is TaskKind.PREPARE:
            self.report(done)

    def _attempt(self, compute: Callable[[], object]) -> None:
        try:
            compute()
        except Exception as error:
            if not is_found_alike(error):
                raise
            log.debug(f"a step failed here as on the rank that schedules: {first_line(error)}")
            self._error = error
