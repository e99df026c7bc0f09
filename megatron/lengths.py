"""From the flags to how large batches are, how long samples are, and how long a run is."""

from collections.abc import Mapping
from functools import lru_cache

from megatron.config.curriculum import (
    Curriculum,
    curriculum_of_block,
    curriculum_of_flags,
    one_curriculum,
)
from megatron.config.deepspeed.plan import user_json
from megatron.config.optimizer import ScheduleConfig, warmup_samples
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.progress import BatchSchedule, Duration, TokenCount


def batch_schedule(config: RunConfig, data_parallel_size: int) -> BatchSchedule:
    """Return the global batch size over the run; ConfigError where it does not divide."""
    training = config.training
    one_each = training.micro_batch_size * data_parallel_size
    ramp = training.rampup_batch_size
    return BatchSchedule(
        training.micro_batch_size,
        training.global_batch_size or one_each,
        data_parallel_size,
        rampup=None if ramp is None else (ramp[0], ramp[1], ramp[2]),
        steps=tuple(
            (step.first_token // config.data.seq_length, step.size) for step in training.batch_steps
        ),
    )


def curriculum(config: RunConfig) -> Curriculum | None:
    """Return the length of training samples by iteration; None: full length.

    The schedule comes from flags or from DeepSpeed's JSON.

    Raises:
        ConfigError: the two contradict each other, or the block of the JSON is not one.
    """
    from_flags = curriculum_of_flags(config.training, seq_length=config.data.seq_length)
    block = user_json(config).get("curriculum_learning") if config.engine.deepspeed else None
    given = curriculum_of_block(block) if isinstance(block, Mapping) else None
    return one_curriculum(from_flags, given)


def token_count(config: RunConfig, batches: BatchSchedule) -> TokenCount:
    """Return the tokens that iterations of the run consume."""
    return _token_count(batches, curriculum(config), config.data.seq_length)


@lru_cache(maxsize=16)  # called at every step with the same arguments
def warmup_tokens(
    schedule: ScheduleConfig, batches: BatchSchedule, grows: Curriculum | None, seq_length: int
) -> int:
    """Return the tokens of a warm-up in samples or iterations, after which tokens decay.

    Args:
        grows: the length of training samples by iteration; None: `seq_length`.
    """
    samples = warmup_samples(schedule, batches.global_batch_size)
    return _token_count(batches, grows, seq_length).of_samples(samples)


def _token_count(batches: BatchSchedule, grows: Curriculum | None, seq_length: int) -> TokenCount:
    if grows is None:
        return TokenCount(batches, lambda _: seq_length)
    return TokenCount(batches, grows.length_at, grows.settled_at)


def duration(config: RunConfig, batches: BatchSchedule) -> Duration:
    """Return how long the run is; ConfigError where it is shorter than one iteration."""
    training = config.training
    counted = None if training.train_tokens is None else token_count(config, batches)
    return Duration(
        batches, training.train_iters, training.train_samples, training.train_tokens, counted
    )


def num_samples(
    training: TrainingConfig, length: Duration, global_batch_size: int
) -> tuple[int, int, int]:
    """Return the samples that the run reads for training, validation and test; 0: not used.

    Validation runs every eval-interval iterations and once at the end; the reference's
    `train_iters // eval_interval + 1` covers both.
    """
    one_evaluation = training.eval_iters * global_batch_size
    interval = training.eval_interval
    evaluations = (length.total_iterations // interval if interval else 0) + 1
    evaluations += training.eval_at_start
    return length.total_samples, evaluations * one_evaluation, one_evaluation
