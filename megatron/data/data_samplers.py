"""Selects the samples of each rank: lists of sample numbers, one list per micro-batch.

A step of the whole data-parallel group takes `micro_batch_size * data_parallel_size` samples in
order and rank r the r-th slice of them, so the union over ranks, and with it a resumed run, does
not depend on the number of ranks. What a reader would get wrong: samplers count micro-batches; a
ramp of the global batch size only changes how many of them make a step.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from megatron.errors import ConfigError, DataError


class MegatronPretrainingSampler:
    """Samples in their stored order, once, from `consumed_samples` on.

    With `drop_last` a tail that does not fill a step is left out; without it the tail is shared
    evenly by the ranks, and refused if it cannot be.
    """

    def __init__(
        self,
        *,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        _check(
            total_samples,
            consumed_samples,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        )
        step = micro_batch_size * data_parallel_size
        if consumed_samples > total_samples:
            raise DataError(
                "more samples were consumed than the dataset holds",
                found=f"{consumed_samples} consumed of {total_samples}",
                fix="resume with the dataset and the number of samples of the first run",
            )
        if drop_last and total_samples < step:
            raise _smaller_than_a_step(total_samples, step)
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self._size, self._rank, self._step = micro_batch_size, data_parallel_rank, step
        self._full_steps, tail = divmod(total_samples - consumed_samples, step)
        self._tail_per_rank = 0 if drop_last else tail // data_parallel_size
        if not drop_last and tail % data_parallel_size:
            raise DataError(
                "the last samples cannot be shared evenly by the data-parallel ranks",
                found=f"{tail} samples left for {data_parallel_size} ranks",
                fix="leave them out (drop_last=True), or use a number of ranks that divides them",
            )

    def __len__(self) -> int:
        """Return the number of micro-batches that this rank still gets."""
        return self._full_steps + (self._tail_per_rank > 0)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._full_steps):
            start = self.consumed_samples + step * self._step + self._rank * self._size
            yield list(range(start, start + self._size))
        if self._tail_per_rank:
            start = self.consumed_samples + self._full_steps * self._step
            start += self._rank * self._tail_per_rank
            yield list(range(start, start + self._tail_per_rank))

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the samples at positions [start, stop) of the run, over all ranks."""
        return np.arange(start, stop)


class MegatronPretrainingRandomSampler:
    """Samples in a new random order each epoch, without end over epochs.

    Sample number p of the run is element p mod total of the permutation drawn from (seed, p div
    total): nothing depends on ranks or batch sizes, and any `consumed_samples` can be resumed. One
    iteration ends with the micro-batch that completes the epoch, which may reach into the next one;
    iterating again continues there.
    """

    def __init__(
        self,
        *,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        seed: int,
    ) -> None:
        _check(
            total_samples,
            consumed_samples,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        )
        if total_samples < micro_batch_size * data_parallel_size:
            raise _smaller_than_a_step(total_samples, micro_batch_size * data_parallel_size)
        if not 0 <= seed < 2**32:
            raise ConfigError(
                "the seed of the sample order is out of range",
                found=f"--seed {seed}",
                fix="use a seed from 0 to 4294967295",
            )
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self._size, self._rank, self._seed = micro_batch_size, data_parallel_rank, seed
        self._orders: dict[int, npt.NDArray[np.integer]] = {}
        self._step = micro_batch_size * data_parallel_size

    def __len__(self) -> int:
        """Return the number of micro-batches that this rank still gets in the current epoch."""
        left = self.total_samples - self.consumed_samples % self.total_samples
        return (left + self._step - 1) // self._step

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.consumed_samples // self.total_samples
        order = self._permutation(epoch)
        for _ in range(len(self)):
            start = self.consumed_samples + self._rank * self._size - epoch * self.total_samples
            stop = start + self._size
            batch = order[start:stop].tolist()
            if stop > self.total_samples:
                next_order = self._permutation(epoch + 1)
                past = max(start - self.total_samples, 0)
                batch += next_order[past : stop - self.total_samples].tolist()
            # The position is updated before the yield: readers see this batch as consumed.
            self.consumed_samples += self._step
            yield batch

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the samples at positions [start, stop) of the run, over all ranks."""
        total = self.total_samples
        parts = [
            self._permutation(epoch)[max(start - epoch * total, 0) : stop - epoch * total]
            for epoch in range(start // total, (stop - 1) // total + 1)
        ]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts]).astype(np.int64)

    def _permutation(self, epoch: int) -> npt.NDArray[np.integer]:
        """Return the order of an epoch; those of two epochs are kept."""
        if epoch not in self._orders:
            if len(self._orders) > 1:
                del self._orders[min(self._orders)]
            self._orders[epoch] = self._drawn_permutation(epoch)
        return self._orders[epoch]

    def _drawn_permutation(self, epoch: int) -> npt.NDArray[np.integer]:
        # RandomState, because its stream is frozen by NumPy's compatibility policy.
        rng = np.random.RandomState([self._seed, epoch])
        order: npt.NDArray[np.integer]
        if self.total_samples <= 2**32:
            order = np.arange(self.total_samples, dtype=np.uint32)
        else:
            order = np.arange(self.total_samples, dtype=np.int64)
        rng.shuffle(order)
        return order


def _check(total: int, consumed: int, micro_batch_size: int, rank: int, size: int) -> None:
    if total < 1:
        raise DataError(
            "there is nothing to sample from",
            found=f"a dataset of {total} samples",
            fix="check --data-path and --split",
        )
    if consumed < 0:
        raise DataError(
            "the number of consumed samples is negative",
            found=consumed,
            fix="resume from an intact checkpoint",
        )
    if micro_batch_size < 1:
        raise ConfigError(
            "a micro-batch holds at least one sample",
            found=f"--micro-batch-size {micro_batch_size}",
            fix="use --micro-batch-size 1 or more",
        )
    if not 0 <= rank < size:
        raise ValueError(f"data-parallel rank {rank} of {size}")


def _smaller_than_a_step(total: int, step: int) -> DataError:
    return DataError(
        "the dataset is smaller than one micro-batch on every data-parallel rank",
        found=f"{total} samples; one step of all ranks takes {step}",
        fix="use a smaller --micro-batch-size, fewer data-parallel ranks, or more data",
    )
