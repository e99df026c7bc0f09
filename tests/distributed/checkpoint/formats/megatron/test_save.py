"""A job writes Megatron's files from what its ranks hold, all or nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.formats.megatron.names import partition_of_name
from megatron.checkpoint.formats.megatron.save import LiveSource, save_megatron
from megatron.checkpoint.formats.megatron.source import MegatronSource
from megatron.checkpoint.sharded import Placement, ShardedTensor, Snapshot
from megatron.checkpoint.source import SourceOptions, TensorDescription
from megatron.config.run import RunConfig
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import local_slice
from megatron.mpu.topology import Topology
from tests.support.checkpoints.sources import MemorySource, assert_same
from tests.support.ranks import run_on_ranks
from tests.support.t5.runs import train_t5_all
from tests.support.tiny import FP64, assert_close, whole
from tests.support.tiny_bert import (
    TinySentences,
    tiny_bert_run,
    train_bert_all,
    write_tiny_sentences,
)

ROWS, PADDED = 11, 12


def _snapshot(ctx: ParallelContext, source: MemorySource) -> Snapshot:
    """What a rank of a job holds: its stage's layers, cut over tp, with padding rows."""
    layers = 2 // ctx.pp.size
    tensors = []
    for name, value in source.values.items():
        parameter = name.split("/")[-1]
        if not _is_here(parameter, ctx, layers):
            continue
        rows = None
        if parameter == "embedding.word.weight":
            rows, value = ROWS, torch.cat([value, torch.zeros(PADDED - ROWS, value.shape[1])])
        partition = partition_of_name(parameter, gated=False)
        local = local_slice(value, partition, ctx.tp.rank, ctx.tp.size).clone()
        placement = Placement(partition, ctx.tp.rank, ctx.tp.size, rows)
        tensors.append(ShardedTensor.of(name, local, placement))
    return Snapshot(tuple(tensors), source.progress, source.config, source.scalars)


def _is_here(parameter: str, ctx: ParallelContext, layers: int) -> bool:
    if parameter.startswith("layers."):
        return int(parameter.split(".")[1]) // layers == ctx.pp.rank
    if parameter == "embedding.word.weight":  # tied: the last stage has it too
        return ctx.pp.is_first or ctx.pp.is_last
    return ctx.pp.is_first if parameter.startswith("embedding.") else ctx.pp.is_last


def _save(folder: str, tp: int, pp: int) -> None:
    world = torch.distributed.get_world_size()
    ctx = ParallelContext.build(Topology.fill(world, tp=tp, pp=pp))
    snapshot = _snapshot(ctx, MemorySource.of_gpt(optimizer=True))
    saved = save_megatron(folder, snapshot, iteration=10, ctx=ctx, num_chunks=1, padded_rows=PADDED)
    assert saved.directory == Path(folder) / "iter_0000010"
    assert saved.bytes > 1000


@pytest.mark.parametrize(("world", "tp", "pp"), [(1, 1, 1), (4, 2, 1), (4, 2, 2), (2, 1, 2)])
def test_what_a_job_writes_is_the_whole_of_what_its_ranks_hold(
    tmp_path: Path, world: int, tp: int, pp: int
) -> None:
    run_on_ranks(world, _save, str(tmp_path), tp, pp)
    with MegatronSource(tmp_path / "iter_0000010", SourceOptions()) as found:
        found.verify()
        expected = MemorySource.of_gpt(optimizer=True)
        assert_same(found, expected)
        assert found.scalars == expected.scalars
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000010",
        "latest_checkpointed_iteration.txt",
    ]


def _fail(folder: str) -> str:
    ctx = ParallelContext.build(Topology.fill(2, tp=2, pp=1))
    snapshot = _snapshot(ctx, MemorySource.of_gpt(optimizer=True))
    if ctx.rank == 1:  # as if another rank had shared its state out
        snapshot = Snapshot(
            tuple(t for t in snapshot.tensors if t.name != "optimizer/exp_avg/final_norm.bias"),
            snapshot.progress,
            snapshot.config,
            snapshot.scalars,
        )
    try:
        save_megatron(folder, snapshot, iteration=20, ctx=ctx, num_chunks=1, padded_rows=PADDED)
    except CheckpointError as error:
        return str(error)
    return "nothing was refused"


def test_a_rank_that_lacks_its_part_stops_all_and_leaves_the_former_one(tmp_path: Path) -> None:
    run_on_ranks(1, _save, str(tmp_path), 1, 1)
    first, second = run_on_ranks(2, _fail, str(tmp_path))
    assert first == second
    assert "does not hold what Megatron's file of this rank would" in first
    assert "tools/convert_checkpoint.py" in first
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000010",
        "latest_checkpointed_iteration.txt",
    ]


def test_a_live_source_reads_only_what_is_here() -> None:
    value = torch.arange(12.0).view(4, 3)
    tensor = ShardedTensor.of("model/w", value)
    described = {"model/w": TensorDescription("F32", (4, 3))}
    source = LiveSource(Snapshot((tensor,), {}, {"model": {}}), described)
    assert torch.equal(source.read("model/w", Box((1, 0), (2, 2))), value[1:3, :2])
    assert (source.progress, source.scalars, source.config) == ({}, {}, {"model": {}})
    with pytest.raises(CheckpointError, match="does not hold what Megatron's file"):
        source.read("model/v", Box((0,), (1,)))


def tiny_t5(corpus: TinySentences, **flags: Any) -> RunConfig:
    """A T5 that Megatron has too."""
    of_t5 = {"decoder_num_layers": 3, "decoder_seq_length": 20, "vocab_extra_ids": 16}
    return tiny_bert_run(corpus, **(of_t5 | flags))


@pytest.mark.parametrize(
    ("kind", "tiny_run", "trains", "pp"),
    [("bert", tiny_bert_run, train_bert_all, 2), ("t5", tiny_t5, train_t5_all, 1)],
)
def test_a_run_that_saves_as_megatron_goes_on_at_another_layout(
    tmp_path: Path, kind: str, tiny_run: Any, trains: Any, pp: int
) -> None:
    corpus, folder = write_tiny_sentences(tmp_path / "corpus"), str(tmp_path / "megatron")
    spread = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": pp}
    saving = {"save": folder, "checkpoint_format": "megatron", "train_iters": 4, "exit_interval": 2}
    run = tiny_run(corpus, **saving, **spread)
    saved = run_on_ranks(2 * pp, trains, [run])
    state = whole([record for (record,) in saved], prefix="model/")
    with MegatronSource(tmp_path / "megatron" / "iter_0000002", SourceOptions()) as source:
        assert source.kind == kind
        for name, tensor in state.items():
            known = source.tensors[name]
            box = Box((0,) * len(known.global_shape), known.global_shape)
            assert torch.equal(source.read(name, box), tensor), name
    # The rest of it on one rank, and all of it without a stop.
    onward = tiny_run(corpus, load=folder, train_iters=4)
    unbroken = tiny_run(corpus, train_iters=4)
    rest, all_of_it = run_on_ranks(1, trains, [onward, unbroken])[0]
    assert_close(rest.losses, all_of_it.losses[2:], FP64)
