"""Which samples each rank really drew, compared with the plan over all ranks.

Readers (the first of the ranks that take the same samples, on every pipeline stage) record the ids
that their loader read, in whatever process; all ranks record a checksum of the batches that they
received. What a reader would get wrong: counters agree even where one loader skips a sample, since
each rank computes them by itself. Ids are compared as sums of hashes, without regard to order.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megatron.engine.base import RawBatch
from megatron.errors import DataError
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import ParallelContext

Ids = npt.NDArray[np.int64]
# The ids at positions [start, stop) of a run, over all replicas.
PlannedIds = Callable[[int, int], Ids]
_BITS = 2**64


class IdSummary(NamedTuple):
    """How many ids, the smallest and the largest, and the sum of their hashes."""

    size: int
    smallest: int
    largest: int
    hashes: int

    def __str__(self) -> str:
        return f"{self.size} samples ({self.smallest} to {self.largest})"


class DrawReport(NamedTuple):
    """What one rank drew; of `drawn`, `planned` and `planned_of_all` readers alone know."""

    stage: int
    replica: int
    batches: int
    checksum: int
    drawn: IdSummary | None = None
    planned: IdSummary | None = None
    planned_of_all: IdSummary | None = None


def id_summary(ids: Ids) -> IdSummary:
    """Return the summary of ids, which does not depend on their order."""
    if not ids.size:
        return IdSummary(0, 0, 0, 0)
    return IdSummary(ids.size, int(ids.min()), int(ids.max()), int(_hashes(ids).sum()))


class DrawnSamples:
    """Records what this rank's training draws between two comparisons.

    Args:
        position: samples that all replicas had consumed before.
    """

    def __init__(self, context: ParallelContext, *, micro_batch_size: int, position: int) -> None:
        self._context, self._size, self._position = context, micro_batch_size, position
        self._ids: list[Sequence[int]] = []
        self._planned_ids: PlannedIds | None = None
        self._batches = self._checksum = 0

    def add_ids(self, ids: Sequence[int], planned_ids: PlannedIds) -> None:
        """Record the ids of a micro-batch that this rank's loader read."""
        self._ids.append(ids)
        self._planned_ids = planned_ids

    def add_batch(self, batch: RawBatch) -> None:
        """Record a micro-batch as this rank received it, in host memory."""
        self._batches += 1
        for name in sorted(batch):
            values = batch[name].contiguous().reshape(-1).view(torch.uint8)
            self._checksum = zlib.crc32(values.numpy().data, self._checksum)

    def agree(self, consumed_samples: int) -> None:
        """Compare what all ranks drew up to `consumed_samples` with the plan, and begin anew.

        Raises:
            DataError: on every rank, naming the ranks whose samples are others.
        """
        reports = all_gather_object(self._report(consumed_samples), self._context.world)
        problems = list(differences_from_plan(reports))
        if problems:
            raise DataError(
                "the ranks did not draw the samples of the plan",
                found=f"samples {self._position} to {consumed_samples} of the run: "
                + "; ".join(problems),
                fix="resume from the last checkpoint; if it happens again, suspect the dataset or "
                "the node of these ranks",
            )
        self._ids.clear()
        self._batches, self._position = 0, consumed_samples

    def _report(self, stop: int) -> DrawReport:
        context = self._context
        own = DrawReport(context.pp.rank, context.dp.rank, self._batches, self._checksum)
        if self._planned_ids is None:
            return own
        of_all = self._planned_ids(self._position, stop)
        parts = of_all.reshape(-1, context.dp.size, self._size)
        drawn = np.array([one for ids in self._ids for one in ids], dtype=np.int64)
        return own._replace(
            drawn=id_summary(drawn),
            planned=id_summary(parts[:, context.dp.rank].reshape(-1)),
            planned_of_all=id_summary(of_all),
        )


def differences_from_plan(reports: Sequence[DrawReport]) -> Iterator[str]:
    """Say which ranks drew other samples than planned, together or each, or other batches.

    Args:
        reports: of all ranks, in their order.
    """
    readers: dict[int, list[DrawReport]] = defaultdict(list)
    received: dict[int, dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, report in enumerate(reports):
        received[report.replica][report.batches, report.checksum].append(rank)
        if report.drawn is not None:
            readers[report.stage].append(report)
            if report.drawn != report.planned:
                yield f"rank {rank} drew {report.drawn}, planned were {report.planned}"
    for stage, of_stage in readers.items():
        drawn = [report.drawn for report in of_stage if report.drawn is not None]
        together = (sum(one.size for one in drawn), sum(one.hashes for one in drawn) % _BITS)
        for planned in {report.planned_of_all for report in of_stage if report.planned_of_all}:
            if together != (planned.size, planned.hashes):
                yield (
                    f"all replicas of pipeline stage {stage} together drew {together[0]} samples "
                    f"that are not the {planned} of the plan, each once"
                )
    for replica, ranks_of in received.items():
        if len(ranks_of) > 1:
            groups = " and ".join(", ".join(map(str, ranks)) for ranks in ranks_of.values())
            yield f"ranks {groups} of replica {replica} received different batches"


def _hashes(ids: Ids) -> npt.NDArray[np.uint64]:
    """Return splitmix64 of ids: sums of equally many others hardly ever are the same."""
    mixed = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
