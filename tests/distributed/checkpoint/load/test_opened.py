"""Ranks agree on the format of a checkpoint, and get one type for any format."""

from pathlib import Path

import torch

from megatron.checkpoint.load import storage
from megatron.checkpoint.load.opened import format_on_all_ranks, open_on_all_ranks
from megatron.checkpoint.source import SourceOptions
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.checkpoints.megatron_files import Shape, save_megatron, whole_model
from tests.support.ranks import run_on_ranks
from tests.unit.checkpoint.toy import snapshot_at

SHAPE = Shape(gated=True, tied=False)
TOKENS = SourceOptions(vocab_size=41)


def _summary(folders: list[str]) -> str:
    ctx = ParallelContext.build(Topology.fill(torch.distributed.get_world_size(), tp=1, pp=1))
    try:
        opened = open_on_all_ranks(folders[ctx.rank], ctx=ctx, options=TOKENS)
    except CheckpointError as error:
        return f"{error.problem}: {error.found}"
    opened.check_resumable()
    opened.verify_all()
    opened.close()
    return f"{opened.format_name} {opened.is_native} {opened.manifest.iteration}"


def test_each_format_is_opened_as_the_same_kind_of_value(tmp_path: Path) -> None:
    ours, megatron = tmp_path / "ours", tmp_path / "theirs"
    snapshot = snapshot_at(1, 1, 0, iteration=5)
    storage.save_snapshot(ours, snapshot, iteration=5, ctx=ParallelContext.single())
    save_megatron(megatron, whole_model(SHAPE), SHAPE, tp=2)
    assert run_on_ranks(2, _summary, [str(ours)] * 2) == ["sharded True 5"] * 2
    assert run_on_ranks(2, _summary, [str(megatron)] * 2) == ["megatron False 10"] * 2


def test_ranks_that_see_different_formats_say_so(tmp_path: Path) -> None:
    save_megatron(tmp_path / "a", whole_model(SHAPE), SHAPE)
    (tmp_path / "none").mkdir()
    messages = run_on_ranks(2, _summary, [str(tmp_path / "a"), str(tmp_path / "none")])
    for text in messages:
        assert "ranks see different checkpoints in the same folder" in text
        assert "rank 0 sees format megatron, rank 1 sees sharded" in text


def test_where_there_is_none_or_a_store_our_own_loading_says_what_is_wrong(tmp_path: Path) -> None:
    ctx = ParallelContext.single()
    for folder in (str(tmp_path), "memory://bucket/run"):
        assert format_on_all_ranks(folder, None, ctx=ctx).is_native
