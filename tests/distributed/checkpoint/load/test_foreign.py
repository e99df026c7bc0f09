"""Several ranks load what another program wrote, each its own part, and fail together."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.formats.megatron.names import megatron_name, partition_of_name
from megatron.checkpoint.load.foreign import open_foreign
from megatron.checkpoint.sharded import Placement, ShardedTensor
from megatron.checkpoint.source import SourceOptions
from megatron.config.checkpoint import Verification
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import local_shape, local_slice
from megatron.mpu.topology import Topology
from tests.support.checkpoints.megatron_files import Shape, save_megatron, whole_model
from tests.support.ranks import run_on_ranks

SHAPE = Shape(gated=True, tied=False)
TOKENS = SourceOptions(vocab_size=41)


def _context(tp: int) -> ParallelContext:
    if not torch.distributed.is_initialized():
        return ParallelContext.single()
    return ParallelContext.build(Topology.fill(torch.distributed.get_world_size(), tp=tp, pp=1))


def _targets(ctx: ParallelContext, names: list[str], padded: int = 44) -> list[ShardedTensor]:
    """Empty memory for this rank's part of every named parameter, vocabularies padded."""
    model = whole_model(SHAPE)
    targets = []
    for name in names:
        partition = partition_of_name(name, gated=True)
        shape = tuple(model[megatron_name(name)].shape)
        rows = None
        if name in ("embedding.word.weight", "output.weight"):
            shape, rows = (padded, *shape[1:]), 41
        local = torch.full(local_shape(shape, partition, ctx.tp.size), float("nan"))
        placement = Placement(partition, ctx.tp.rank, ctx.tp.size, rows)
        targets.append(ShardedTensor.of(f"model/{name}", local, placement))
    return targets


def _load(folder: str, tp: int) -> None:
    ctx = _context(tp)
    opened = open_foreign(folder, ctx=ctx, options=TOKENS)
    names = [name.removeprefix("model/") for name in opened.manifest.tensors]
    targets = _targets(ctx, names)
    opened.read_into(targets, prefixes=("model/",))
    opened.check_resumable()
    model = whole_model(SHAPE)
    for target, name in zip(targets, names):
        expected = model[megatron_name(name)]
        if target.padding:
            expected = torch.cat([expected[:41], torch.zeros(3, expected.shape[1])])
        partition = partition_of_name(name, gated=True)
        local = local_slice(expected, partition, ctx.tp.rank, ctx.tp.size)
        views = sorted(
            ((part.box.offset, part.view) for part in target.parts), key=lambda pair: pair[0]
        )
        found = torch.cat([view.reshape(-1) for _, view in views])
        kept = local.reshape(-1)[: found.numel()] if target.padding else local.reshape(-1)
        if partition is None or partition.dim == 0:
            assert torch.equal(found, kept), name
        assert all(not view.any() for view in target.padding)
    opened.close()


@pytest.mark.parametrize(("world", "tp"), [(1, 1), (2, 2), (2, 1), (4, 2)])
def test_every_rank_gets_its_part_of_files_of_another_layout(
    tmp_path: Path, world: int, tp: int
) -> None:
    save_megatron(tmp_path, whole_model(SHAPE), SHAPE, tp=2, pp=2)
    run_on_ranks(world, _load, str(tmp_path), tp)


def _refusals(folder: str, damaged: str) -> list[str]:
    ctx = _context(2)
    opened = open_foreign(folder, ctx=ctx, options=TOKENS)
    names = [name.removeprefix("model/") for name in opened.manifest.tensors]
    messages = []

    def attempt(targets: list[ShardedTensor], **how: Any) -> None:
        try:
            opened.read_into(targets, **how)
        except CheckpointError as error:
            messages.append(f"{error.problem}: {error.found}")

    attempt(_targets(ctx, names)[:-1], prefixes=("model/",))
    short = _targets(ctx, names)
    short[0] = ShardedTensor.of("model/embedding.word.weight", torch.zeros(3, 16))
    attempt(short)
    moment = ShardedTensor.of("optimizer/exp_avg/final_norm.bias", torch.zeros(16))
    attempt([*_targets(ctx, names), moment])
    half = [ShardedTensor.of("model/final_norm.bias", torch.zeros(16).bfloat16())]
    attempt(half, only=lambda name: name == "model/final_norm.bias")
    attempt(half, only=lambda name: name == "model/final_norm.bias", cast=True)
    if ctx.rank == 0:
        with open(damaged, "r+b") as file:
            file.seek(-3000, 2)
            byte = file.read(1)
            file.seek(-3000, 2)
            file.write(bytes([byte[0] ^ 1]))
    torch.distributed.barrier()
    attempt(_targets(ctx, names))
    return messages


def test_every_refusal_is_the_same_on_every_rank(tmp_path: Path) -> None:
    directory = save_megatron(tmp_path, whole_model(SHAPE), SHAPE, tp=2)
    damaged = directory / "mp_rank_01" / "model_optim_rng.pt"
    first, second = run_on_ranks(2, _refusals, str(tmp_path), str(damaged))
    assert first == second
    assert [problem.split(":")[0] for problem in first[:4]] == [
        "the checkpoint is of another model or optimizer than this run",
        "the checkpoint is of another model or optimizer than this run",
        "the checkpoint holds weights alone, and the run is to go on with its optimizer",
        "the checkpoint is of another model or optimizer than this run",
    ]
    assert "unexpected: model/output.weight" in first[0]
    assert "dtype: model/final_norm.bias is F32" in first[3]
    assert len(first) == 5
    assert "is damaged" in first[4] or "cannot be read" in first[4]


def _different(folders: list[str]) -> str:
    ctx = _context(1)
    folder = folders[ctx.rank]
    try:
        open_foreign(folder, ctx=ctx, options=TOKENS)
    except CheckpointError as error:
        return f"{error.problem}: {error.found}"
    return "nothing was refused"


def test_ranks_that_see_different_checkpoints_say_so(tmp_path: Path) -> None:
    for name, iteration in (("a", 10), ("b", 20)):
        save_megatron(tmp_path / name, whole_model(SHAPE), SHAPE, iteration=iteration)
    messages = run_on_ranks(2, _different, [str(tmp_path / "a"), str(tmp_path / "b")])
    for text in messages:
        assert "ranks see different checkpoints in the same folder: directory, facts" in text


def test_a_run_goes_on_only_where_its_samples_are_known(tmp_path: Path) -> None:
    directory = save_megatron(tmp_path, whole_model(SHAPE), SHAPE)
    path = directory / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    del content["args"].consumed_train_samples, content["args"].global_batch_size
    torch.save(content, path)
    ctx = ParallelContext.single()
    opened = open_foreign(tmp_path, ctx=ctx, options=TOKENS, verification=Verification.SIZE)
    with pytest.raises(CheckpointError, match="does not record how many samples"):
        opened.check_resumable()
