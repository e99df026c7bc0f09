"""gpt-neox's rules for the sizes of batches: arithmetic alone."""

from typing import NamedTuple

from megatron.errors import ConfigError


class BatchSizes(NamedTuple):
    """Samples of a forward pass of one replica, and of an iteration of all."""

    micro: int
    train: int


def replicas(world_size: int, *, pipeline: int, tensor: int) -> int:
    """Return the number of replicas of a model that is split over so many ranks.

    Raises:
        ConfigError: the ranks are no whole number of them.
    """
    ranks = max(1, pipeline) * max(1, tensor)
    if world_size % ranks:
        raise ConfigError(
            "the ranks are no whole number of replicas",
            found=f"{world_size} ranks, pipe_parallel_size {pipeline}, model_parallel_size "
            f"{tensor}",
            fix=f"start a multiple of {ranks} ranks",
        )
    return world_size // ranks


def batch_sizes(
    *, train: int | None, micro: int | None, accumulation: int | None, replicas: int
) -> BatchSizes:
    """Return the sizes that gpt-neox derives from those that a config gives.

    Args:
        accumulation: 1 where the config has no such key; None where it says null.

    Raises:
        ConfigError: neither size is given, or no whole numbers agree with what is given.
    """
    given = (
        f"train_batch_size {train}, train_micro_batch_size_per_gpu {micro}, "
        f"gradient_accumulation_steps {accumulation}, {replicas} replicas"
    )
    if train is None and micro is None:
        raise ConfigError(
            "the size of the batches is not given",
            found=given,
            fix="give train_micro_batch_size_per_gpu, or train_batch_size",
        )
    if micro is None:
        assert train is not None  # noqa: S101  # invariant: one of them is given
        steps = 1 if accumulation is None else accumulation
        micro = train // replicas // max(1, steps)
    elif train is None:
        steps = 1 if accumulation is None else accumulation
        train = micro * steps * replicas
    else:
        steps = train // max(1, micro) // replicas if accumulation is None else accumulation
    if min(train, micro, steps) < 1 or train != micro * steps * replicas:
        raise ConfigError(
            "the sizes of the batches contradict each other",
            found=given,
            fix=f"use train_batch_size {max(1, micro) * max(1, steps) * replicas}, or "
            "gradient_accumulation_steps null, which derives it",
        )
    return BatchSizes(micro, train)
