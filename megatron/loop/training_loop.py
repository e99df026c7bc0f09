"""The one training loop. Pretraining and fine-tuning give it batches and what they do after a step.

The loop decides numbers and the engine obeys. A feature that makes `TrainingLoop.train` longer
belongs in a hook, in `plan_step` or in the caller instead. What a reader would get wrong: the
report of a step is read when the next one has been started, unless a hook has to act before that;
and the clock of the step log stands still from that report until all hooks after it are done.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from megatron.checkpoint.save.background import BackgroundSaves
from megatron.config.curriculum import Curriculum
from megatron.config.run import RunConfig
from megatron.engine.base import Engine, PendingReport, RawBatch, StepPlan
from megatron.host import lasting_objects
from megatron.launch import accounts_folder
from megatron.lengths import curriculum as curriculum_of
from megatron.loop.hooks import (
    AgreeOnState,
    CheckNumbers,
    CheckRepeats,
    CollectGarbage,
    CompletedStep,
    Hook,
    KeepAccount,
    ReportStep,
    SaveCheckpoints,
    collecting_by_hand,
    state_of,
)
from megatron.loop.profile import Profile
from megatron.loop.report import StepLog
from megatron.loop.startup import announce_deepspeed, announce_run, open_step_log
from megatron.loop.step_plan import EXPECTED, plan_step, progress_after
from megatron.loop.stop import StopConditions
from megatron.loop.stragglers import ReportStragglers
from megatron.model.specs import ModelBuild
from megatron.mpu.context import Group
from megatron.peers.activity import HOOKS, SAVE, Activity
from megatron.peers.goodput import AccountKeeper
from megatron.preflight.agreement import agree_on_state
from megatron.progress import Duration, Progress
from megatron.timers import Timers
from megatron.trackers.tracker import RunName

# The micro-batches of the next step on this rank; None if that iteration is not to be trained on.
StepBatches = Callable[[StepPlan, Progress], Iterator[RawBatch] | None]


@dataclass(frozen=True)
class TrainingLoop:
    """The parts of a training that is ready for its first step; made by `training_loop`."""

    engine: Engine
    config: RunConfig
    world: Group
    duration: Duration
    curriculum: Curriculum | None
    step_log: StepLog
    stop: StopConditions
    saves: BackgroundSaves
    profile: Profile
    activity: Activity
    account: AccountKeeper | None = None

    def train(
        self,
        progress: Progress,
        batches_of: StepBatches,
        own_hooks: tuple[Hook, ...],
        save: SaveCheckpoints,
    ) -> tuple[Progress, str]:
        """Train until a stop condition holds; return the progress and the reason to stop.

        Args:
            own_hooks: the caller's hooks after a step, such as an evaluation; called before `save`.
        """
        flags, first = self.config.training, progress.iteration
        hooks: tuple[Hook, ...] = (
            ReportStep(self.step_log, self.engine, self.config.logging.log_params_norm),
            self.profile,
            CheckNumbers(flags, self.engine),
            CheckRepeats(self.engine, flags.rerun_check_interval),
            ReportStragglers(
                self.activity, self.world, self.config.logging.straggler_report_interval
            ),
            AgreeOnState(self.engine, self.world, flags.check_agreement_interval),
            CollectGarbage(flags.manual_gc_interval),
            *own_hooks,
            save,
            KeepAccount(self.account),
        )
        steps = _Steps(progress, hooks, self.step_log, self.activity)
        self.step_log.restart_clock()
        while (
            reason := self.stop.reason(
                steps.started, steps_done=steps.started.iteration - first, signals=steps.signals
            )
        ) is None:
            self.activity.step(steps.started.iteration + 1)
            self.saves.poll()
            plan = plan_step(self.config, self.duration, steps.started, self.curriculum)
            raw = batches_of(plan, steps.started)
            if raw is None:
                steps.skip(plan)
                continue
            used: list[RawBatch] = []
            with self.profile.step(steps.started.iteration):
                report = self.engine.start_step(_noted(raw, used), plan, self.stop.signals())
            steps.add(plan, report, used)
        progress = steps.read()
        save.save_unsaved(progress)
        with self.activity.during(SAVE):
            self.saves.wait()
        self.activity.end()
        if self.account is not None:
            self.account.keep(progress.iteration, now=True)
        return progress, reason


class _Steps:
    """The steps of a training, of which the last one may still run.

    Attributes:
        read_up_to: the progress of the steps whose reports were read.
        started: the progress with the running step, if it turns out well.
        signals: what of the signals to stop holds on any rank, of the report read last while
            another step runs; None: no step runs.
    """

    def __init__(
        self, progress: Progress, hooks: Sequence[Hook], step_log: StepLog, activity: Activity
    ) -> None:
        self._hooks, self._step_log, self._activity = hooks, step_log, activity
        self._running: tuple[StepPlan, PendingReport, Sequence[RawBatch]] | None = None
        self.read_up_to = self.started = progress
        self.signals: Sequence[bool] | None = None

    def add(self, plan: StepPlan, report: PendingReport, batches: Sequence[RawBatch]) -> None:
        """Add a step that was started, and read the report of the one before it.

        Where a hook has to act before the next step, the report of this one is read too.
        """
        self.signals = self._read()
        self._running = plan, report, batches
        self.started = progress_after(self.read_up_to, plan, EXPECTED)
        if any(hook.precedes_next_step(self.started) for hook in self._hooks):
            self.read()

    def skip(self, plan: StepPlan) -> None:
        """Count an iteration without a step."""
        self.read_up_to = self.started = progress_after(self.read(), plan, None)

    def read(self) -> Progress:
        """Wait for the running step, if there is one; return the progress, which is final then."""
        self._read()
        self.signals, self.started = None, self.read_up_to
        return self.read_up_to

    def _read(self) -> tuple[bool, ...]:
        """Read the report of the running step, and call the hooks; return its signals."""
        if self._running is None:
            return ()
        (plan, report, batches), self._running = self._running, None
        step = CompletedStep(plan, report(), batches)
        progress = progress_after(self.read_up_to, plan, step.result)
        with self._activity.during(HOOKS):
            for hook in self._hooks:
                progress = hook(progress, step)
        self._step_log.resume_clock()
        self.read_up_to = progress
        return step.result.signals


def _noted(batches: Iterator[RawBatch], used: list[RawBatch]) -> Iterator[RawBatch]:
    """Yield the batches of a step, and add each to `used`: they stay in memory until its report."""
    for batch in batches:
        used.append(batch)
        yield batch


@contextmanager
def training_loop(
    engine: Engine,
    config: RunConfig,
    build: ModelBuild,
    duration: Duration,
    progress: Progress,
    timers: Timers,
    run_name: RunName,
    activity: Activity,
) -> Iterator[TrainingLoop]:
    """Prepare a training on all ranks together: its log, stop conditions and saves.

    Checks that all ranks begin in the same state and announces the run. On leaving by an error, a
    save in progress is abandoned.

    Args:
        engine: with the weights to begin with.
        progress: how far they are.
        run_name: by which trackers know the run; made here where one is needed.
        activity: of this process's main thread, which the loop keeps up to date.
    """
    context = build.ctx
    with ExitStack() as resources:
        step_log = resources.enter_context(
            open_step_log(engine.task, config, context, build, duration, progress, timers, run_name)
        )
        if config.engine.deepspeed:
            announce_deepspeed(config, replicas=context.dp.size)
        stop = StopConditions(config.training, duration, context.world)
        resources.enter_context(stop.listening())
        resources.enter_context(lasting_objects())
        resources.enter_context(collecting_by_hand(config.training.manual_gc))
        saves = resources.enter_context(BackgroundSaves(context))
        profile = resources.enter_context(Profile(config.logging, context.world))
        agree_on_state(state_of(progress, engine), context.world)
        announce_run(engine, config, context, build, duration, progress)
        yield TrainingLoop(
            engine,
            config,
            context.world,
            duration,
            curriculum_of(config),
            step_log,
            stop,
            saves,
            profile,
            activity,
            _account(activity, progress, context.world),
        )


def _account(activity: Activity, progress: Progress, world: Group) -> AccountKeeper | None:
    """Return what writes down the time of this start, on the rank that does, if it is asked for."""
    folder = accounts_folder()
    if folder is None or not world.is_first:
        return None
    return AccountKeeper(folder, activity, progress.iteration)
