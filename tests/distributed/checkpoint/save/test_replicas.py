"""A bit that flips in a rank's memory while it saves: found before the commit, in every layout."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.files import durable, torch_file
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.manifest import FileRecord
from megatron.checkpoint.folder.retention import KEEP_ALL
from megatron.checkpoint.formats.native import sharded
from megatron.checkpoint.save import background
from megatron.checkpoint.save.background import BackgroundSaves
from megatron.checkpoint.save.saving import save_snapshot
from megatron.checkpoint.save.sealed_save import SealedSave
from megatron.checkpoint.sharded import Snapshot
from megatron.errors import NumericsError
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.launch import unfinished
from tests.support.ranks import run_on_ranks
from tests.unit.checkpoint.toy import snapshot_at

NAME = "model/norm.weight"  # which all ranks hold
WRITER, WITNESS = "writer", "witness"
Save = Callable[[Path, Snapshot, ParallelContext], object]


def values_of(snapshot: Snapshot) -> Tensor:
    return snapshot.by_name()[NAME].parts[0].view


def flip(values: Tensor) -> None:
    values.view(torch.int32)[0] ^= 1 << 3


def waiting(folder: Path, snapshot: Snapshot, ctx: ParallelContext) -> None:
    save_snapshot(folder, snapshot, iteration=1, ctx=ctx)


def beside(folder: Path, snapshot: Snapshot, ctx: ParallelContext) -> None:
    with BackgroundSaves(ctx) as saves:
        saves.start(folder, snapshot, iteration=1)
        saves.wait()


def sealed(folder: Path, snapshot: Snapshot, ctx: ParallelContext) -> None:
    stage = folder / ".iter_0000001.partial-0"
    stage.mkdir(parents=True, exist_ok=True)
    save = SealedSave(
        ctx=ctx,
        stage=stage,
        snapshot=snapshot,
        iteration=1,
        retention=KEEP_ALL,
        started=time.monotonic(),
    )

    def write() -> Mapping[str, FileRecord]:
        name = f"rank-{ctx.rank}.pt"
        return {name: torch_file.save(stage / name, [1])}

    save.complete(write, commit=lambda: folders.commit(stage, 1))


SAVES: Mapping[str, Save] = {"waits": waiting, "beside": beside, "sealed": sealed}


@contextmanager
def flipped_while_writing(snapshot: Snapshot) -> Iterator[None]:
    """Flip a bit with the first block that this rank writes."""
    real, done = durable.DurableFile.write, []

    def write(file: durable.DurableFile, data: object) -> None:
        if not done:
            done.append(flip(values_of(snapshot)))
        real(file, data)  # type: ignore[arg-type]

    with patch.object(durable.DurableFile, "write", write):
        yield


def problems_of_saves(folder: Path, tp: int, dp: int, faulty: int, role: str) -> dict[str, str]:
    """The error of each way to save, where a bit flips on one rank; empty: there was none."""
    ctx = ParallelContext.build(Topology(tp=tp, dp=dp))
    found = {}
    for way, save in SAVES.items():
        snapshot = snapshot_at(tp, dp, ctx.rank)
        try:
            if ctx.rank == faulty:
                with flipped(way, snapshot, role):
                    save(folder / way, snapshot, ctx)
            else:
                save(folder / way, snapshot, ctx)
            found[way] = ""
        except NumericsError as error:
            found[way] = str(error)
    return found


@contextmanager
def copied_and_flipped() -> Iterator[None]:
    """Flip a bit of every copy in host memory, of what is copied there, before it is written."""
    real = background.HostMemory.copy_of

    def copy_of(memory: background.HostMemory, share: Snapshot) -> Snapshot:
        copy = real(memory, share)
        for tensor in copy.tensors:
            for part in tensor.parts:
                part.view.view(-1).view(torch.uint8)[0] ^= 1
        return copy

    with patch.object(background.HostMemory, "copy_of", copy_of):
        yield


def flipped(way: str, snapshot: Snapshot, role: str) -> AbstractContextManager[None]:
    """The fault of a rank: in what is written, or in what that is compared with."""
    if way != "beside":
        return flipped_while_writing(snapshot)
    if role == WRITER:
        return copied_and_flipped()
    flip(values_of(snapshot))  # it is compared as it is when the copies are made
    return nullcontext()


@pytest.mark.parametrize("role", [WRITER, WITNESS])
@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 1), (1, 3)])
def test_a_bit_that_flips_while_a_rank_saves_is_no_checkpoint(
    tmp_path: Path, tp: int, dp: int, role: str
) -> None:
    snapshots = [snapshot_at(tp, dp, rank) for rank in range(tp * dp)]
    plan = sharded.plan_write([sharded.describe(snapshot) for snapshot in snapshots])
    faulty = next(
        rank
        for rank, part in enumerate(plan.ranks)
        for key in (part.work if role == WRITER else part.witnessed)
        if key.name == NAME
    )
    for found in run_on_ranks(tp * dp, problems_of_saves, tmp_path, tp, dp, faulty, role):
        for way, error in found.items():
            assert "ranks hold different values of what a checkpoint stores once" in error, way
            # What this rank copies for a background save may be another piece.
            assert NAME in error or way == "beside", way
    for way in SAVES:
        assert folders.iterations(tmp_path / way) == []
        assert not unfinished(tmp_path / way), way


def problems_of_good_saves(folder: Path) -> int:
    ctx = ParallelContext.build(Topology(tp=2, dp=2))
    for way, save in SAVES.items():
        save(folder / way, snapshot_at(2, 2, ctx.rank), ctx)
    return len(SAVES)


def test_replicas_that_agree_are_saved(tmp_path: Path) -> None:
    assert run_on_ranks(4, problems_of_good_saves, tmp_path) == [len(SAVES)] * 4
    for way in SAVES:
        assert folders.iterations(tmp_path / way) == [1]
