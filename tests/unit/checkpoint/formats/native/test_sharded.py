"""Which rank writes what, and any layout to any layout through real files, in one process."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.files.mapped_tensors import MappedTensors
from megatron.checkpoint.files.safetensors_header import read as read_header
from megatron.checkpoint.folder.manifest import FileRecord, GridLayout, SavedPiece, SavedTensor
from megatron.checkpoint.formats.native import sharded
from megatron.checkpoint.formats.native.sharded import assign_writers
from megatron.checkpoint.sharded import GeneratorStates, Placement, ShardedTensor, Snapshot
from megatron.errors import CheckpointError, NumericsError
from megatron.mpu.partition import Partition
from tests.unit.checkpoint.folder.test_manifest import example
from tests.unit.checkpoint.toy import WEIGHTS, differences, rank_at, snapshot_at

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 3), (2, 3)]


def write_all(directory, snapshots, layout=GridLayout(1, 1, 1)):  # noqa: B008
    """What all ranks of a job would write, one after the other."""
    plan = sharded.plan_write([sharded.describe(snapshot) for snapshot in snapshots])
    parts = [
        sharded.write(directory, snapshot, plan, rank=rank)
        for rank, snapshot in enumerate(snapshots)
    ]
    tensors = {
        name: SavedTensor(*known, tuple(p for part in parts for p in part.pieces.get(name, ())))
        for name, known in plan.tensors.items()
    }
    files = {name: record for part in parts for name, record in part.files.items()}
    generators = tuple(part.generators for part in parts if part.generators)
    return plan, example(layout=layout, tensors=tensors, files=files, generators=generators)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    checkpoints = {}
    for tp, dp in LAYOUTS:
        directory = tmp_path_factory.mktemp("saved")
        snapshots = [snapshot_at(tp, dp, rank) for rank in range(tp * dp)]
        checkpoints[tp, dp] = directory, *write_all(directory, snapshots)
    return checkpoints


@pytest.mark.parametrize("there", LAYOUTS)
@pytest.mark.parametrize("here", LAYOUTS)
def test_every_layout_loads_every_other_bit_for_bit(saved, there, here):
    directory, _, content = saved[there]
    for rank in range(math.prod(here)):
        target, expected = rank_at(*here, rank, seed=None), rank_at(*here, rank)
        sharded.plan_read(directory, content, target.tensors, cast=False).fill(1)
        assert differences(target, expected) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_is_written_once_and_files_hold_what_the_manifest_says(saved, layout):
    directory, plan, content = saved[layout]
    data = {name: 0 for name in content.files}
    for tensor in content.tensors.values():
        for piece in tensor.pieces:
            data[piece.file] += tensor.bytes * piece.box.size // math.prod(tensor.global_shape)
    for name, record in content.files.items():
        assert (directory / name).stat().st_size == record.bytes
        if name.startswith("shard"):
            entries = read_header(directory / name).entries.values()
            assert sum(e.stop - e.start for e in entries) == data[name]
    assert sum(data.values()) == sum(tensor.bytes for tensor in content.tensors.values())
    planned = sum(rank.bytes for rank in plan.ranks)
    assert planned >= content.bytes, "the room that is asked for is enough"


def test_replicas_share_the_writing():
    tensors = tuple(ShardedTensor.of(f"w{i}", torch.zeros(100)) for i in range(8))
    snapshots = [Snapshot(tensors, progress={}, config={})] * 4
    plan = sharded.plan_write([sharded.describe(snapshot) for snapshot in snapshots])
    assert [len(rank.work) for rank in plan.ranks] == [2, 2, 2, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_several_ranks_hold_has_one_witness_that_is_not_its_writer(saved, layout):
    _, plan, _ = saved[layout]
    snapshots = [snapshot_at(*layout, rank) for rank in range(math.prod(layout))]
    offers = [sharded.describe(snapshot) for snapshot in snapshots]
    held = [{(name, box) for name, _, boxes in offer.tensors for box in boxes} for offer in offers]
    for key in {key for rank in plan.ranks for key in rank.work}:
        holders = [rank for rank, of_rank in enumerate(held) if key in of_rank]
        (writer,) = (rank for rank in holders if key in plan.ranks[rank].work)
        witnesses = [rank for rank, part in enumerate(plan.ranks) if key in part.witnessed]
        assert len(witnesses) == (len(holders) > 1)
        assert set(witnesses) <= set(holders) - {writer}
        assert (key in plan.replicated) == (len(holders) > 1)


def test_replicas_that_differ_are_named_with_their_ranks():
    piece = sharded.PieceKey("w", Box((0,), (4,)))
    record = SavedPiece("shard", piece.box, "aa")
    written = sharded.WrittenPart({}, {"w": (record,)}, None)
    agrees = sharded.WrittenPart({}, {}, None, {piece: "aa"})
    sharded.check_replicas([agrees, written])
    with pytest.raises(NumericsError, match=r"1 of 1 pieces: w on ranks 0, 1") as caught:
        sharded.check_replicas([agrees._replace(digests={piece: "ab"}), written])
    assert "take that machine out" in caught.value.fix


@given(st.lists(st.tuples(st.integers(0, 50), st.sets(st.integers(0, 5), min_size=1)), max_size=20))
def test_each_piece_is_written_by_one_holder_and_no_holder_is_overloaded(pieces):
    sizes, holders = [size for size, _ in pieces], [sorted(ranks) for _, ranks in pieces]
    writers = assign_writers(sizes, holders)
    assert all(writer in ranks for writer, ranks in zip(writers, holders))
    if all(ranks == list(range(6)) for ranks in holders) and sizes:
        loads = [sum(s for s, w in zip(sizes, writers) if w == rank) for rank in range(6)]
        assert max(loads) - min(loads) <= max(sizes)


def test_large_elements_come_first_so_that_all_are_aligned(saved):
    directory, _, _ = saved[1, 1]
    for entry in read_header(directory / "shard-00000-of-00001.safetensors").entries.values():
        size = (entry.stop - entry.start) // max(1, math.prod(entry.shape))
        assert entry.start % size == 0


def test_random_states_come_back_per_rank(saved):
    directory, _, content = saved[2, 2]
    for rank in range(4):
        states = sharded.read_generators(directory, content, rank)
        assert states.values == {"rank": rank}
        assert states.tensors["cpu"].tolist() == [rank] * 5


def offer(*tensors, generators=None):
    return sharded.describe(Snapshot(tensors, progress={}, config={}, generators=generators))


def test_ranks_that_disagree_about_a_tensor_are_refused():
    one, other = (ShardedTensor.of("w", torch.zeros(n)) for n in (2, 3))
    with pytest.raises(CheckpointError, match="ranks disagree about a tensor") as caught:
        sharded.plan_write([offer(one), offer(other)])
    assert "w: F32 [2] elsewhere, F32 [3] on rank 1" in str(caught.value)


def test_a_tensor_that_no_rank_holds_in_full_is_refused():
    half = ShardedTensor.of("w", torch.zeros(2), Placement(Partition(), 0, 2))
    with pytest.raises(CheckpointError, match="do not hold a whole tensor") as caught:
        sharded.plan_write([offer(half)])
    assert "w: 2 of 4 elements" in str(caught.value)


def test_random_states_of_some_ranks_only_are_refused():
    states = GeneratorStates({}, {"a": 1})
    with pytest.raises(CheckpointError, match="some ranks hand over random states"):
        sharded.plan_write([offer(generators=states), offer()])


def test_a_random_state_that_json_cannot_hold_is_refused():
    with pytest.raises(CheckpointError, match="random state cannot be written"):
        offer(generators=GeneratorStates({}, {"a": object()}))


def test_another_dtype_is_converted_only_when_asked(saved):
    directory, _, content = saved[1, 1]
    target = ShardedTensor.of("model/qkv.weight", torch.zeros(12, 6))
    with pytest.raises(CheckpointError, match="another model or optimizer") as caught:
        sharded.plan_read(directory, content, [target], cast=False)
    assert "BF16 in the checkpoint and F32 in this run" in str(caught.value)
    sharded.plan_read(directory, content, [target], cast=True).fill(1)
    expected = rank_at(1, 1, 0).memory["model/qkv.weight"]
    assert torch.equal(target.parts[0].view, expected.float())


def test_planning_a_read_touches_no_target(saved):
    directory, _, content = saved[1, 1]
    target = rank_at(1, 1, 0, seed=None)
    plan = sharded.plan_read(directory, content, target.tensors, cast=False)
    assert plan.files == {"shard-00000-of-00001.safetensors"}
    assert bool(target.memory["model/norm.weight"].isnan().all())


def test_a_file_that_holds_something_else_than_the_manifest_says_is_refused(tmp_path):
    snapshot = Snapshot((ShardedTensor.of("w", torch.zeros(4)),), progress={}, config={})
    _, content = write_all(tmp_path, [snapshot])
    wrong = dataclasses.replace(content.tensors["w"], dtype_code="I32")
    content = dataclasses.replace(content, tensors={"w": wrong})
    target = ShardedTensor.of("w", torch.zeros(4, dtype=torch.int32))
    with pytest.raises(CheckpointError, match="does not hold what the manifest says"):
        sharded.plan_read(tmp_path, content, [target], cast=False).fill(1)


def test_a_rank_with_nothing_to_write_makes_no_shard(tmp_path):
    snapshot = Snapshot((ShardedTensor.of("w", torch.zeros(4)),), progress={}, config={})
    _, content = write_all(tmp_path, [snapshot, snapshot])
    assert list(content.files) == ["shard-00000-of-00002.safetensors"]
    assert all(isinstance(record, FileRecord) for record in content.files.values())


@pytest.mark.parametrize("layout", [(1, 1), (2, 1)])
def test_tensors_that_lie_together_can_be_read_there(saved, layout):
    directory, _, content = saved[layout]
    whole, mapped = rank_at(1, 1, 0).memory, set()
    for name in WEIGHTS:
        name = f"model/{name}"
        found = sharded.range_of(directory, content, name)
        if found is not None:
            (values,) = MappedTensors([found], {}).tensors
            true = whole[name][: values.shape[0]] if values.dim() else whole[name]
            assert torch.equal(values, true)
            mapped.add(name)
    assert len(mapped) == (len(WEIGHTS) if layout == (1, 1) else 2), "norm and temperature"


def test_a_piece_that_is_not_in_its_file_is_not_read_there(saved):
    directory, _, content = saved[1, 1]
    name = "model/norm.weight"
    other = dataclasses.replace(content.tensors[name], dtype_code="F16")
    changed = dataclasses.replace(content, tensors={**content.tensors, name: other})
    with pytest.raises(CheckpointError, match="does not hold what the manifest says") as caught:
        sharded.range_of(directory, changed, name)
    assert "norm.weight is ('F32', (6,)), expected ('F16', (6,))" in str(caught.value.found)
