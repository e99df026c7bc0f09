"""Host memory of a node: batches, workers, the copy of a save, and tensors of ranks on CPUs."""

from typing import Any

from megatron.config.runtime import DeviceKind
from megatron.planning.host_memory import ASYNC_SAVE, BATCHES, LOCAL, TENSORS, WORKERS, host_bytes
from megatron.planning.rehearsal import rehearse
from megatron.planning.saves import checkpoint_bytes
from tests.support.tiny import TOKENS_PER_SAMPLE
from tests.unit.planning.test_rehearsal import world_of

BATCH = 2 * (TOKENS_PER_SAMPLE + 1) * 8  # of int64


def node(size: int = 8, per_node: int = 4, **flags: Any) -> dict[str, int]:
    given = {"bf16": True, "micro_batch_size": 2, "global_batch_size": 2 * size, "device": "auto"}
    world = world_of(size, **given | flags)
    return dict(host_bytes(world, rehearse(world, world.representatives()), per_node))


def test_batches_are_pinned_and_workers_read_ahead() -> None:
    assert node() == {BATCHES: 2 * 4 * BATCH}
    assert node(num_workers=3)[WORKERS] == 4 * 3 * 2 * BATCH  # readers, workers, ahead of each
    evaluated = node(num_workers=3, eval_iters=1)
    assert evaluated[WORKERS] == 3 * 4 * 3 * 2 * BATCH
    split = node(num_workers=3, eval_iters=1, split="90,10,0")
    assert split[WORKERS] == 2 * 4 * 3 * 2 * BATCH


def test_groups_of_validation_have_a_loader_each() -> None:
    groups = {
        "data_path": None,
        "split": "969, 30, 1",
        "train_weighted_split_paths": ("T: 1 0:0.5 a",),
        "valid_weighted_split_paths": ("V: 1 0.5:0.6 a", "W: 1 0.6:0.7 a"),
    }
    flags = {"num_workers": 1, "eval_iters": 1, "global_batch_size": 16} | groups
    assert node(**flags)[WORKERS] == 3 * 4 * 2 * BATCH


def test_one_rank_of_those_that_take_the_same_samples_reads() -> None:
    flags = {"num_workers": 1, "global_batch_size": 8, "tensor_model_parallel_size": 2}
    assert node(**flags)[WORKERS] == 2 * 2 * BATCH


def test_ranks_copy_what_they_will_write_of_a_save() -> None:
    flags = {"async_save": True, "save": "somewhere"}
    world = world_of(8, bf16=True, **flags)
    size = checkpoint_bytes(rehearse(world, world.representatives()))
    assert node(**flags)[ASYNC_SAVE] == size // 2  # of two nodes
    assert ASYNC_SAVE not in node(save="somewhere")


def test_local_checkpoints_are_held_twice_and_for_other_nodes_too() -> None:
    flags = {"save": "there", "load": "there", "non_persistent_save_interval": 2}
    world = world_of(8, bf16=True, **flags, non_persistent_local_ckpt_dir="/dev/shm/run")
    (rank,) = rehearse(world, world.representatives())
    state = rank.bytes.weights + rank.bytes.optimizer
    in_memory = flags | {"non_persistent_local_ckpt_dir": "/dev/shm/run"}
    assert node(**in_memory)[LOCAL] == 4 * 2 * state
    copied = in_memory | {"replication": True, "replication_jump": 4}
    assert node(**copied)[LOCAL] == 2 * 4 * 2 * state
    assert LOCAL not in node(**flags, non_persistent_local_ckpt_dir="/disk/run")


def test_on_cpus_tensors_are_host_memory_and_nothing_is_pinned() -> None:
    found = node(device="cpu")
    world = world_of(8, bf16=True, micro_batch_size=2, global_batch_size=16)
    assert world.config.launch.device is DeviceKind.CPU
    (rank,) = rehearse(world, world.representatives())
    assert found == {TENSORS: 4 * rank.bytes.peak, BATCHES: 4 * BATCH}
