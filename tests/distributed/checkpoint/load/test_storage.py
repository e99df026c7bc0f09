"""Checkpoints of several ranks: any layout to any layout, and one verdict when one rank fails."""

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint import rng
from megatron.checkpoint.files import durable
from megatron.checkpoint.folder import manifest as manifests
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.retention import Retention
from megatron.checkpoint.load import storage
from megatron.checkpoint.sharded import Snapshot
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.ranks import run_on_ranks
from tests.unit.checkpoint.toy import LAYOUTS, differences, rank_at, snapshot_at


def context(tp, dp):
    return ParallelContext.build(Topology(tp=tp, dp=dp))


def save(folder, ctx, iteration, *, seed):
    tp, dp = ctx.tp.size, ctx.dp.size
    snapshot = snapshot_at(tp, dp, ctx.rank, seed=seed, iteration=iteration)
    return storage.save_snapshot(
        folder, snapshot, iteration=iteration, ctx=ctx, retention=Retention(3)
    )


def differing(folder, ctx, *, seed):
    """What differs between the latest checkpoint and this rank's part of the toy of `seed`."""
    tp, dp = ctx.tp.size, ctx.dp.size
    target = rank_at(tp, dp, ctx.rank, seed=None)
    storage.open_checkpoint(folder, ctx=ctx).read_into(target.tensors)
    return differences(target, rank_at(tp, dp, ctx.rank, seed=seed))


def verdict(step):
    try:
        step()
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for tp, dp in LAYOUTS:
        run_on_ranks(tp * dp, save_at, folder, tp, dp)
    return folder


def save_at(folder, tp, dp):
    save(folder / f"{tp}x{dp}", context(tp, dp), 100, seed=5)


@pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
def test_every_layout_loads_every_other_bit_for_bit(saved, tp, dp):
    assert run_on_ranks(tp * dp, load_all, saved, tp, dp) == [[[]] * len(LAYOUTS)] * (tp * dp)


def load_all(folder, tp, dp):
    ctx = context(tp, dp)
    return [differing(folder / f"{a}x{b}", ctx, seed=5) for a, b in LAYOUTS]


def test_the_manifest_holds_the_layout_and_a_shard_of_every_rank(saved):
    content, _ = manifests.load(saved / "2x2" / "iter_0000100")
    assert content.layout == manifests.GridLayout(tp=2, pp=1, dp=2)
    shards = [name for name in content.files if name.startswith("shard")]
    assert shards == [f"shard-{rank:05d}-of-00004.safetensors" for rank in range(4)]
    assert len(content.generators) == 4


def test_a_rank_whose_disk_is_full_is_named_by_all_and_the_former_checkpoint_stays(tmp_path):
    results = run_on_ranks(4, save_with_full_disks, tmp_path)
    assert len({tuple(result) for result in results}) == 1, "all ranks say the same"
    messages, names, after = results[0][:-2], results[0][-2], results[0][-1]
    for rank, message in enumerate(messages):
        assert f"rank {rank} of 4 failed while writing the checkpoint of iteration 200" in message
        assert "ENOSPC" in message
        assert "free space" in message
    assert names == ("iter_0000100", folders.TRACKER)
    assert after == "[]"


def save_with_full_disks(folder):
    ctx = context(2, 2)
    save(folder, ctx, 100, seed=1)
    write, messages = durable.DurableFile.write, []

    def fail(file, data):
        raise OSError(errno.ENOSPC, "No space left on device", "/save/full")

    for failing in range(4):
        durable.DurableFile.write = fail if ctx.rank == failing else write
        messages.append(verdict(lambda: save(folder, ctx, 200, seed=2)))
    durable.DurableFile.write = write
    names = tuple(sorted(os.listdir(folder)))
    assert differing(folder, ctx, seed=1) == []
    save(folder, ctx, 300, seed=3)
    return [*messages, names, str(differing(folder, ctx, seed=3))]


def test_a_rank_that_dies_while_writing_leaves_the_former_checkpoint(tmp_path):
    run_on_ranks(2, save_once, tmp_path, 100, 1)
    with pytest.raises(AssertionError, match="rank 1 of 2 died with exit code 9"):
        run_on_ranks(2, die_while_writing, tmp_path)
    stages = [name for name in os.listdir(tmp_path) if name.startswith(".iter_0000200.partial-")]
    assert len(stages) == 1, "nobody was left to remove it"
    assert run_on_ranks(2, load_once, tmp_path, 1) == [[], []]
    run_on_ranks(2, save_once, tmp_path, 300, 3)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000100", "iter_0000300", folders.TRACKER]


def save_once(folder, iteration, seed):
    save(folder, context(2, 1), iteration, seed=seed)


def load_once(folder, seed):
    return differing(folder, context(2, 1), seed=seed)


def die_while_writing(folder):
    ctx = context(2, 1)
    write = durable.DurableFile.write

    def die(file, data):
        write(file, data[: len(data) // 2])
        os._exit(9)

    if ctx.rank == 1:
        durable.DurableFile.write = die
    save(folder, ctx, 200, seed=2)


def test_damage_that_one_rank_finds_is_the_verdict_of_all(saved, tmp_path):
    results = run_on_ranks(2, load_damaged, saved / "2x1", tmp_path)
    assert results[0] == results[1]
    for name, message in results[0].items():
        assert name in message
        assert "failed while" in message, "one rank found it"
        assert "expected" in message
    assert len(results[0]) == 5


def load_damaged(folder, scratch):
    """Damage each file in turn (on rank 0), and return the errors of all ranks."""
    ctx = context(2, 1)
    messages = {}
    content, _ = manifests.load(folder / "iter_0000100")
    cases = [(name, "flip") for name in content.files] + [(next(iter(content.files)), "cut")]
    for name, kind in cases:
        path = Path(folder) / "iter_0000100" / name
        good = path.read_bytes()
        torch.distributed.barrier()
        if ctx.rank == 0:
            bad = good[:-1] + bytes([good[-1] ^ 1]) if kind == "flip" else good[:-1]
            path.write_bytes(bad)
        torch.distributed.barrier()
        target = rank_at(2, 1, ctx.rank, seed=None)

        def load(target=target):
            opened = storage.open_checkpoint(folder, ctx=ctx)
            opened.read_into(target.tensors)

        messages[name if kind == "flip" else f"{name}: expected"] = verdict(load)
        assert bool(target.memory["model/norm.weight"].isnan().all())
        torch.distributed.barrier()
        if ctx.rank == 0:
            path.write_bytes(good)
    torch.distributed.barrier()
    return messages


def test_ranks_that_differ_are_refused_before_anything_happens(tmp_path):
    results = run_on_ranks(2, differ, tmp_path)
    assert results[0] == results[1]
    point, view, named, unexpected = results[0]
    assert "ranks are not at the same point" in point
    assert "iteration, progress of rank 1" in point
    assert "ranks see different checkpoints" in view
    assert "rank 1 of 2 failed while matching" in named
    assert "missing: model/other" in named
    assert "unexpected: model/norm.weight" in unexpected
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "both"]


def differ(folder):
    ctx = context(1, 2)
    alone = ParallelContext.single()
    save(folder / "both", ctx, 50, seed=1)
    storage.save_snapshot(
        folder / str(ctx.rank),
        snapshot_at(1, 1, 0, seed=ctx.rank),
        iteration=7,
        ctx=alone,
    )
    os.chdir(folder / str(ctx.rank))  # the same path, two folders: disks that are not shared
    messages = [
        verdict(lambda: save(folder / "no", ctx, 100 + ctx.rank, seed=1)),
        verdict(lambda: storage.open_checkpoint(".", ctx=ctx)),
    ]
    tensors = rank_at(1, 2, ctx.rank, seed=None).tensors
    opened = storage.open_checkpoint(folder / "both", ctx=ctx)
    if ctx.rank == 1:
        other = (type(tensors[0])("model/other", (1,), torch.float32, ()),)
        messages.append(verdict(lambda: opened.read_into(tensors + other)))
    else:
        messages.append(verdict(lambda: opened.read_into(tensors)))
    fewer = [tensor for tensor in tensors if tensor.name != "model/norm.weight"]
    messages.append(verdict(lambda: opened.read_into(fewer)))
    return messages


def test_every_rank_gets_its_own_generators_back(tmp_path):
    results = run_on_ranks(4, generators_of_ranks, tmp_path)
    assert all(before == after for before, after in results)
    assert len({str(before) for before, _ in results}) == 4, "ranks draw different numbers"


def generators_of_ranks(folder):
    ctx = context(2, 2)
    random.seed(ctx.rank)
    np.random.seed(ctx.rank)
    torch.manual_seed(ctx.rank)
    snapshot = Snapshot((), progress={}, config={}, generators=rng.capture())
    storage.save_snapshot(folder, snapshot, iteration=1, ctx=ctx)
    before = draws()
    draws()
    opened = storage.open_checkpoint(folder, ctx=ctx)
    assert rng.why_not_restorable(opened.manifest, ctx.topology) is None
    rng.restore(opened.read_generators())
    return before, draws()


def draws():
    return [torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()]
