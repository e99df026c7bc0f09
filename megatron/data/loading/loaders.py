"""A torch DataLoader over one rank's micro-batches.

What a reader would get wrong: torch turns an error of a worker process into a RuntimeError, which
would lose the exit code and the fix; here a MegatronError keeps its class, with the worker's
traceback as a note. Drawing a loader's seed leaves the global generators alone, so a resumed run
sees the same random numbers.
"""

import gc
import traceback
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import data

from megatron import device
from megatron.data.blendable_dataset import Sample, SampleDataset
from megatron.data.data_samplers import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from megatron.errors import ConfigError, DataError, MachineError, MegatronError, first_line

_WORKER_TIMEOUT_S = 600  # a worker that is silent for so long hangs on its file system

Batch = dict[str, torch.Tensor]
T = TypeVar("T")


Sampler = MegatronPretrainingSampler | MegatronPretrainingRandomSampler


class MicrobatchLoader(data.DataLoader[Sample]):
    """A DataLoader of `{"text": int64 [b, s + 1]}` whose workers' errors keep their class.

    Attributes:
        ids: the samples of the micro-batch that was returned last, as they were read.
    """

    ids: Sequence[int] = ()

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # narrower than torch's
        for found in _unless_killed(super().__iter__()):
            if isinstance(found, _Failure):
                found.error.add_note(f"in a data-loader worker:\n{found.trace}")
                raise found.error
            self.ids = found.ids
            yield found.batch

    def planned_ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the samples at positions [start, stop) of the run, over all ranks."""
        return cast("Sampler", self.batch_sampler).ids(start, stop)


def build_data_loader(
    dataset: SampleDataset,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int,
    kind: str = "single",
    seed: int = 1234,
) -> MicrobatchLoader:
    """Return the micro-batches of one data-parallel rank from `consumed_samples` on.

    `kind` is "single" (stored order, once) or "cyclic" (a new order each epoch; one iteration is
    the rest of an epoch). The sampler is bound to the length that `dataset` has now.
    """
    sampler: Sampler
    if kind == "single":
        sampler = MegatronPretrainingSampler(
            total_samples=len(dataset),
            consumed_samples=consumed_samples,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
        )
    elif kind == "cyclic":
        sampler = MegatronPretrainingRandomSampler(
            total_samples=len(dataset),
            consumed_samples=consumed_samples,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            seed=seed,
        )
    else:
        raise ConfigError(
            "an unknown kind of data loader",
            found=f"--dataloader-type {kind}",
            fix="use single or cyclic",
        )
    _check_workers(num_workers)
    return MicrobatchLoader(
        _BatchReader(dataset),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_identity,
        worker_init_fn=_freeze_inherited_garbage,
        pin_memory=device.current().type == "cuda",
        timeout=_WORKER_TIMEOUT_S if num_workers else 0,
        # Without its own generator every iteration would draw from the one that dropout uses.
        generator=torch.Generator().manual_seed(seed),
    )


make_data_loader = build_data_loader


def _unless_killed(batches: Iterator[T]) -> Iterator[T]:
    """Yield batches; a worker process that was killed is an error of the machine, and no bug."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            text = first_line(error)
            if not text.startswith("DataLoader worker (pid"):  # as torch words it
                raise
            raise MachineError(
                "a process that reads data ahead has ended",
                found=text,
                fix="start again; if it happens again, memory or /dev/shm may be short: use fewer "
                "--num-workers",
            ) from error
        yield batch


def _freeze_inherited_garbage(worker: int) -> None:
    """Exclude garbage of the forking process from collection.

    It may hold process groups, whose threads do not exist in a fork: ending them crashes or hangs.
    """
    del worker
    gc.freeze()


class _Failure(NamedTuple):
    error: MegatronError
    trace: str


class BatchWithIds(NamedTuple):
    """A micro-batch, and the samples that it was read from."""

    ids: Sequence[int]
    batch: Batch


def read_batch(dataset: SampleDataset, ids: Sequence[int]) -> BatchWithIds:
    """Read samples into one tensor per key, with the samples along the first dimension."""
    return BatchWithIds(ids, _stack([dataset[index] for index in ids]))


class _BatchReader(data.Dataset[Sample]):
    """Reads whole micro-batches, so that a failure can be returned as data."""

    def __init__(self, dataset: SampleDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> BatchWithIds | _Failure:
        try:
            return read_batch(self.dataset, indices)
        except MegatronError as error:
            if data.get_worker_info() is None:
                raise
            return _Failure(error, traceback.format_exc())


def _stack(samples: Sequence[Sample]) -> Batch:
    """Return one tensor per key, with the samples along the first dimension."""
    shapes = sorted({str({key: value.shape for key, value in s.items()}) for s in samples})
    if len(shapes) > 1:
        raise DataError(
            "the samples of one micro-batch have different shapes",
            found=" and ".join(shapes),
            fix="build every component of a blend with the same --seq-length",
        )
    return {key: torch.from_numpy(np.stack([s[key] for s in samples])) for key in samples[0]}


def _identity(batch: T) -> T:
    return batch


def _check_workers(num_workers: int) -> None:
    if num_workers < 0:
        raise ConfigError(
            "a loader cannot have a negative number of workers",
            found=f"--num-workers {num_workers}",
            fix="use --num-workers 0 to read in the training process",
        )
