"""The one training loop. Pretraining and fine-tuning give it batches and what they do after a step.

The loop decides numbers and the engine obeys. A feature that makes `TrainingLoop.train` longer
belongs in a hook, in `plan_step` or in the caller instead. What a reader would get wrong: the clock
of the step log stands still from the report of a step until all hooks after it are done.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from megatron.checkpoint.save.background import BackgroundSaves
from megatron.config.curriculum import Curriculum
from megatron.config.run import RunConfig
from megatron.engine.base import Engine, RawBatch, StepPlan
from megatron.lengths import curriculum as curriculum_of
from megatron.loop.hooks import (
    AgreeOnState,
    CheckNumbers,
    CompletedStep,
    Hook,
    ReportStep,
    SaveCheckpoints,
    state_of,
)
from megatron.loop.report import StepLog
from megatron.loop.startup import announce_deepspeed, announce_run, open_step_log
from megatron.loop.step_plan import plan_step, progress_after
from megatron.loop.stop import StopConditions
from megatron.model.specs import ModelBuild
from megatron.mpu.context import Group, ParallelContext
from megatron.preflight.agreement import agree_on_state
from megatron.progress import Duration, Progress
from megatron.timers import Timers

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
            CheckNumbers(flags),
            AgreeOnState(self.engine, self.world, flags.check_agreement_interval),
            *own_hooks,
            save,
        )
        self.step_log.restart_clock()
        while (reason := self.stop.reason(progress, steps_done=progress.iteration - first)) is None:
            self.saves.poll()
            plan = plan_step(self.config, self.duration, progress, self.curriculum)
            raw = batches_of(plan, progress)
            result = None if raw is None else self.engine.start_step(raw, plan)()
            progress = progress_after(progress, plan, result)
            if result is None:
                continue
            for hook in hooks:
                progress = hook(progress, CompletedStep(plan, result))
            self.step_log.resume_clock()
        save.save_unsaved(progress)
        self.saves.wait()
        return progress, reason


@contextmanager
def training_loop(
    engine: Engine,
    config: RunConfig,
    context: ParallelContext,
    build: ModelBuild,
    duration: Duration,
    progress: Progress,
    timers: Timers,
) -> Iterator[TrainingLoop]:
    """Prepare a training on all ranks together: its log, stop conditions and saves.

    Checks that all ranks begin in the same state and announces the run. On leaving by an error, a
    save in progress is abandoned.

    Args:
        engine: with the weights to begin with.
        progress: how far they are.
    """
    with ExitStack() as resources:
        step_log = resources.enter_context(
            open_step_log(engine.task, config, context, build, duration, progress, timers)
        )
        if config.engine.deepspeed:
            announce_deepspeed(config, step_log, replicas=context.dp.size)
        stop = StopConditions(config.training, duration, context.world)
        resources.enter_context(stop.listening())
        saves = resources.enter_context(BackgroundSaves(context))
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
        )
