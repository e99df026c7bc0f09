"""Local checkpoints of several ranks on several nodes: folders of their own stand for the nodes."""

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.checkpoint.local import messages
from megatron.checkpoint.local.checkpoints import LocalCheckpoints
from megatron.checkpoint.local.folder import LocalFolder
from megatron.checkpoint.local.opened import OpenedLocal
from megatron.errors import CheckpointError, ConfigError
from megatron.mpu.collectives import barrier
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.ranks import run_on_ranks
from tests.unit.checkpoint.toy import differences, rank_at, snapshot_at

WORLD, PER_NODE = 4, 2
TP, DP = 2, 2
FLAGS = {"model": {"hidden_size": 6}}


def node_of(place: Path, rank: int) -> Path:
    return place / f"node-{rank // PER_NODE}"


def local_of(place: Path, ctx: ParallelContext, *, factor: int = 2) -> LocalCheckpoints:
    root, jump = node_of(place, ctx.rank), PER_NODE if factor > 1 else 1
    return LocalCheckpoints(root, place / "save", ctx, jump=jump, factor=factor)


def context() -> ParallelContext:
    return ParallelContext.build(Topology(tp=TP, dp=DP))


def bits_of(opened: OpenedLocal | None, rank: int, seed: int) -> list[str]:
    """Names of what differs from what the rank saved; "nothing was opened" without any."""
    if opened is None:
        return ["nothing was opened"]
    found = rank_at(TP, DP, rank, seed=None)
    opened.read_into(found.tensors)
    generators = opened.read_generators()
    same = generators.values == {"rank": rank}
    return differences(found, rank_at(TP, DP, rank, seed=seed)) + ([] if same else ["generators"])


def save(place: Path, factor: int, *seeds: int) -> None:
    ctx = context()
    local = local_of(place, ctx, factor=factor)
    for seed in seeds:
        local.save(snapshot_at(TP, DP, ctx.rank, seed=seed), seed)


def restart(place: Path, factor: int, seed: int) -> list[str]:
    ctx = context()
    # Small blocks, so that files are sent in several, and one block holds the ends of two files.
    with patch.object(messages, "BLOCK_BYTES", 1000):
        return bits_of(local_of(place, ctx, factor=factor).newest(FLAGS), ctx.rank, seed)


def saved(place: Path, *seeds: int, factor: int = 2) -> None:
    run_on_ranks(WORLD, save, place, factor, *seeds)


def restarted(place: Path, seed: int, *, factor: int = 2) -> list[list[str]]:
    return run_on_ranks(WORLD, restart, place, factor, seed)


def test_ranks_go_on_from_their_own_states_and_from_a_neighbour_s_when_a_node_is_lost(
    tmp_path: Path,
) -> None:
    saved(tmp_path, 1, 2)
    held = [len(list(node_of(tmp_path, rank).glob("*/rank-*/iter_*"))) for rank in (0, 2)]
    assert held == [WORLD, WORLD], "each node holds the newest state of every rank"
    assert restarted(tmp_path, 2) == [[]] * WORLD
    shutil.rmtree(node_of(tmp_path, 0))
    assert restarted(tmp_path, 2) == [[]] * WORLD
    shutil.rmtree(node_of(tmp_path, 2))
    assert restarted(tmp_path, 2) == [[]] * WORLD, "a new node holds its copies of others again"


def test_without_copies_a_lost_node_sends_the_run_to_its_last_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 1, factor=1)
    shutil.rmtree(node_of(tmp_path, 0))
    assert restarted(tmp_path, 1, factor=1) == [["nothing was opened"]] * WORLD


def test_a_damaged_state_is_fetched_from_where_it_is_whole(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    (file,) = node_of(tmp_path, 0).glob("*/rank-00001-*/iter_*/shard*")
    broken = bytearray(file.read_bytes())
    broken[-1] ^= 1
    file.write_bytes(broken)
    assert restarted(tmp_path, 1) == [[]] * WORLD


def save_in_vain(place: Path, faulty: int, step: str) -> str:
    """Save once, and once more while one rank fails in a step; return the error."""
    ctx = context()
    local = local_of(place, ctx)
    local.save(snapshot_at(TP, DP, ctx.rank, seed=1), 1)

    def full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device", "memory")

    owner, name = (LocalFolder, "write") if step == "write" else (messages, "_append")
    try:
        with patch.object(owner, name, full if ctx.rank == faulty else getattr(owner, name)):
            local.save(snapshot_at(TP, DP, ctx.rank, seed=2), 2)
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("step", "newest"), [("write", 1), ("receive", 2)])
def test_a_rank_that_cannot_save_is_named_by_all_and_the_newest_whole_save_stays(
    tmp_path: Path, step: str, newest: int
) -> None:
    errors = run_on_ranks(WORLD, save_in_vain, tmp_path, 1, step)
    assert len(set(errors)) == 1
    assert "rank 1 of 4 failed while" in errors[0]
    assert "No space left on device" in errors[0]
    assert restarted(tmp_path, newest) == [[]] * WORLD


def kill_between_saves(place: Path) -> None:
    """Write the states of another save on two of the ranks, as if the others had been killed."""
    ctx = context()
    local = local_of(place, ctx, factor=1)
    local.save(snapshot_at(TP, DP, ctx.rank, seed=1), 1)
    real = LocalFolder.put_in_place

    def put_in_place(folder: LocalFolder, stage: Path, iteration: int) -> None:
        if ctx.rank < PER_NODE:
            real(folder, stage, iteration)
        else:
            raise OSError(5, "Input/output error", str(stage))

    with (
        patch.object(LocalFolder, "put_in_place", put_in_place),
        pytest.raises(CheckpointError),
    ):
        local.save(snapshot_at(TP, DP, ctx.rank, seed=2), 2)


def test_a_save_that_only_some_ranks_finished_is_not_gone_on_from(tmp_path: Path) -> None:
    run_on_ranks(WORLD, kill_between_saves, tmp_path)
    assert len(list(node_of(tmp_path, 0).glob("*/rank-*/iter_0000002"))) == PER_NODE
    assert restarted(tmp_path, 1, factor=1) == [[]] * WORLD


def problem_of_one_node(place: Path) -> str:
    ctx = context()
    try:
        LocalCheckpoints(place / "memory", place / "save", ctx, jump=PER_NODE, factor=2)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_copies_on_the_same_node_are_refused_by_all_ranks(tmp_path: Path) -> None:
    found = set(run_on_ranks(WORLD, problem_of_one_node, tmp_path))
    assert len(found) == 1
    assert "the ranks 0, 2 hold the state of rank 0" in found.pop()


def problem_of_room(place: Path) -> str:
    ctx = context()
    local = local_of(place, ctx)
    with patch.object(LocalFolder, "room", lambda folder: 1 << 22):
        try:
            local.reserve(snapshot_at(TP, DP, ctx.rank).tensors)
        except ConfigError as error:
            return str(error)
    return "no error"


def test_room_is_counted_for_the_states_of_other_nodes_too(tmp_path: Path) -> None:
    for found in run_on_ranks(WORLD, problem_of_room, tmp_path):
        assert "for two of each of 4 ranks" in found


def save_alone(place: Path, survivor: int) -> None:
    """Save iteration 1 on all nodes, and make the state of one of them that of another save."""
    ctx = context()
    for attempt in range(2):
        local = local_of(place, ctx, factor=1)
        local.save(snapshot_at(TP, DP, ctx.rank, seed=attempt), 1)
        barrier(ctx.world)
        if attempt == 0 and ctx.rank == 0:
            shutil.copytree(node_of(place, survivor), place / "kept")
        barrier(ctx.world)


def test_states_of_two_saves_of_one_iteration_are_not_mixed(tmp_path: Path) -> None:
    run_on_ranks(WORLD, save_alone, tmp_path, 2)
    shutil.rmtree(node_of(tmp_path, 2))
    shutil.copytree(tmp_path / "kept", node_of(tmp_path, 2))
    assert restarted(tmp_path, 1, factor=1) == [["nothing was opened"]] * WORLD


def save_over_a_bad_wire(place: Path) -> str:
    """Save while a bit flips in what rank 2 receives; return the error."""
    ctx = context()
    local = local_of(place, ctx)
    real = messages._append

    def append(file: object, part: memoryview) -> None:
        broken = bytearray(part)
        broken[-1] ^= 1
        real(file, memoryview(broken))  # type: ignore[arg-type]

    try:
        with patch.object(messages, "_append", append if ctx.rank == 2 else real):
            local.save(snapshot_at(TP, DP, ctx.rank, seed=1), 1)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_what_is_damaged_on_its_way_is_refused(tmp_path: Path) -> None:
    (error,) = set(run_on_ranks(WORLD, save_over_a_bad_wire, tmp_path))
    assert "rank 2 of 4 failed while copying local checkpoints to other nodes" in error
    assert "damaged" in error
