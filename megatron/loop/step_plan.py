"""What the next optimizer step does, as a pure function of how far the run is."""

from megatron.config.curriculum import Curriculum
from megatron.config.optimizer import ScheduleConfig
from megatron.config.run import RunConfig
from megatron.engine.base import StepPlan, StepReport
from megatron.lengths import warmup_tokens
from megatron.optimizer.schedule import learning_rate, weight_decay
from megatron.progress import Duration, Progress

# The report of a step that was applied, as far as progress is concerned.
EXPECTED = StepReport(loss=0.0, grad_norm=0.0)


def plan_step(
    config: RunConfig,
    duration: Duration,
    progress: Progress,
    curriculum: Curriculum | None = None,
) -> StepPlan:
    """Return the numbers of the step that follows `progress`."""
    seen, batches = progress.consumed_samples, duration.batch_schedule
    total = duration.total_samples
    full_length = config.data.seq_length
    schedule = config.schedule

    def rate(schedule: ScheduleConfig) -> float:
        return learning_rate(
            schedule,
            samples=seen,
            tokens=progress.consumed_tokens,
            total_samples=total,
            global_batch_size=batches.global_batch_size,
            warmup_tokens=warmup_tokens(schedule, batches, curriculum, full_length),
        )

    return StepPlan(
        num_microbatches=batches.num_microbatches_at(seen),
        global_batch_size=batches.global_batch_size_at(seen),
        learning_rate=rate(schedule),
        weight_decay=weight_decay(
            schedule, config.optimizer.weight_decay, samples=seen, total_samples=total
        ),
        seq_length=curriculum.length_at(progress.iteration) if curriculum else full_length,
        first_sample=seen,
        decoupled_learning_rate=rate(schedule.decoupled) if schedule.is_decoupled else None,
    )


def progress_after(progress: Progress, plan: StepPlan, result: StepReport | None) -> Progress:
    """Return the progress after the step of `plan`; `result` is None for a skipped step.

    Such an iteration counts as skipped, but not as one that was not finite.
    """
    return progress.after(
        samples=plan.global_batch_size,
        tokens=plan.global_batch_size * plan.seq_length,
        skipped=result is None or result.skipped,
        nonfinite=result is not None and result.skipped and not result.overflow,
    )
