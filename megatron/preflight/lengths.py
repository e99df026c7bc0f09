"""From the training flags to how large batches are and how long a run is."""

from megatron.config.training import TrainingConfig
from megatron.progress import BatchSchedule, Duration


def batch_schedule(training: TrainingConfig, data_parallel_size: int) -> BatchSchedule:
    """The global batch size over the run; ConfigError where it does not divide."""
    one_each = training.micro_batch_size * data_parallel_size
    ramp = training.rampup_batch_size
    return BatchSchedule(
        training.micro_batch_size,
        training.global_batch_size or one_each,
        data_parallel_size,
        rampup=None if ramp is None else (ramp[0], ramp[1], ramp[2]),
    )


def duration(training: TrainingConfig, batches: BatchSchedule) -> Duration:
    """How long the run is; ConfigError where it is shorter than one iteration."""
    return Duration(batches, training.train_iters, training.train_samples)


def num_samples(
    training: TrainingConfig, length: Duration, global_batch_size: int
) -> tuple[int, int, int]:
    """Samples that training, validation and test will read over the whole run; 0: not used.

    Validation runs every eval-interval iterations and once at the end; the reference's
    `train_iters // eval_interval + 1` covers both.
    """
    one_evaluation = training.eval_iters * global_batch_size
    interval = training.eval_interval
    evaluations = (length.total_iterations // interval if interval else 0) + 1
    evaluations += training.eval_at_start
    return length.total_samples, evaluations * one_evaluation, one_evaluation
