"""A rank that executes the steps that another one schedules, until it is told to stop.

It repeats the scheduler's decisions and compares the plans before it computes (`replay`). It draws
no tokens: those of the leader come with the next round. It looks at no clock.
"""

from collections.abc import Callable
from typing import Protocol

from megatron.errors import MegatronError, first_line
from megatron.scheduling.control.member import PrepareDone, TaskKind
from megatron.scheduling.control.messages import Prepare
from megatron.scheduling.control.states import Code
from megatron.scheduling.forward_plan import ForwardPlan
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.replay import FollowingScheduler, RoundRecord
from megatron.scheduling.scheduler import Scheduler
from megatron.serving.ranks.rank_model import RankModel
from megatron.serving.ranks.round_log import EngineEnd, EngineStep, RankMessage, RankTransition


class StepFollower(Protocol):
    """What takes part in a step without drawing, such as `inference.forward.ForwardExecutor`."""

    def follow(self, plan: ForwardPlan) -> None: ...


class Follower:
    """One rank.

    Args:
        executor: of the model's part of this rank.
        limits: those of the leader's scheduler.
        receive: returns the next message of the log.
        model: what transitions change on this rank; None: nothing.
        report: gets what became of each preparation.
    """

    def __init__(
        self,
        executor: StepFollower,
        limits: SchedulerLimits,
        *,
        receive: Callable[[], RankMessage],
        model: RankModel | None = None,
        report: Callable[[PrepareDone], None] = lambda done: None,
    ) -> None:
        self._model, self.report = model, report
        self._executor, self._receive = executor, receive
        self._scheduler = Scheduler(limits)
        self._following = FollowingScheduler(self._scheduler)

    def run(self) -> str:
        """Follow until the leader stops; return why it did.

        Raises:
            ReplayError: a record is missing, or the plans differ.
            Exception: whatever a step raises: other ranks may wait for this one elsewhere then.
        """
        while True:
            match self._receive():
                case EngineEnd(detail):
                    return detail
                case RankTransition(part, prepare):
                    self._take_part(part, prepare)
                case EngineStep(record):
                    self._follow(record)

    def _follow(self, record: RoundRecord) -> None:
        plan = self._following.follow(record)
        self._scheduler.take_ended()
        self._scheduler.take_preemptions()
        if plan.slices:
            self._executor.follow(plan)

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
