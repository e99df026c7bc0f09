"""Which examples make up each batch of each epoch: arithmetic only, from (seed, epoch).

Every example is in exactly one batch of an epoch, whatever the batch size and the number of
replicas; the last batch may have fewer.
"""

import math

import numpy as np

from megatron.mpu.random import hash_seed


def batches_of_epoch(
    num_examples: int, *, batch_size: int, seed: int, epoch: int | None
) -> list[list[int]]:
    """Return the examples of each global batch, shuffled; in order if `epoch` is None."""
    order = list(range(num_examples))
    if epoch is not None:
        random = np.random.RandomState(hash_seed(seed, "epoch", epoch) % 2**32)
        order = random.permutation(num_examples).tolist()
    return [order[start : start + batch_size] for start in range(0, num_examples, batch_size)]


def num_batches(num_examples: int, batch_size: int) -> int:
    """Return the number of batches of one epoch."""
    return math.ceil(num_examples / batch_size)


def share_of_replica(
    batch: list[int], *, micro_batch_size: int, replica: int, replicas: int, num_microbatches: int
) -> list[list[int]]:
    """Return the micro-batches of one replica; the last ones may be short, or empty.

    Micro-batch m of all replicas together is the m-th stretch of the batch, so that losses do not
    depend on how many replicas share it.
    """
    return [
        batch[start : start + micro_batch_size]
        for m in range(num_microbatches)
        for start in [(m * replicas + replica) * micro_batch_size]
    ]
