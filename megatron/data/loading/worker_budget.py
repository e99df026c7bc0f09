"""Checks data-loader workers against the CPUs and the shared memory of this node.

What a reader would get wrong: loaders work one after the other, so CPUs are counted against the
workers of one loader on every rank of the node, but shared memory against those of all loaders.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron import log
from megatron.host import SHARED_MEMORY, shared_memory_bytes, usable_cpus

_BATCHES_PER_WORKER = 2  # torch's prefetch_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """The load of all data loaders of one node."""

    num_workers: int  # of each loader
    loaders: int  # of each rank that reads: training, and each group of validation and test
    readers: int  # ranks of this node that read
    batch_bytes: int  # of one micro-batch

    @property
    def busy_workers(self) -> int:
        """Worker processes that work at the same time on this node."""
        return self.num_workers * self.readers

    @property
    def bytes_in_flight(self) -> int:
        """Shared memory of all batches that workers of all loaders have ready."""
        return self.busy_workers * self.loaders * _BATCHES_PER_WORKER * self.batch_bytes


def announce_worker_budget(load: WorkerLoad) -> None:
    """Warn once when this node has too few CPUs or too little shared memory for `load`."""
    for problem in worker_problems(load, cpus=usable_cpus(), shared_bytes=shared_memory_bytes()):
        log.warning_once(f"worker_budget {problem}", problem)


def worker_problems(load: WorkerLoad, *, cpus: float, shared_bytes: int | None) -> Iterator[str]:
    """Yield where `load` exceeds the CPUs or the shared memory of its node."""
    if not load.num_workers:
        return
    most = int(cpus // load.readers)
    if load.busy_workers > cpus:
        yield (
            f"--num-workers {load.num_workers} on {load.readers} reading ranks of this node makes "
            f"{load.busy_workers} worker processes at a time ({load.loaders} loaders each), but "
            f"{cpus:g} CPUs may be used here; use --num-workers {most}"
        )
    if shared_bytes is not None and load.bytes_in_flight > shared_bytes:
        yield (
            f"data-loader workers keep up to {load.bytes_in_flight / 2**20:.1f} MiB of batches in "
            f"{SHARED_MEMORY}, which has {shared_bytes / 2**20:.1f} MiB free; enlarge it (docker: "
            "--shm-size) or use --num-workers 0"
        )
