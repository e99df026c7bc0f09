"""Saves of a run: the bytes of a checkpoint in every layout, and how many there are at once."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.mpu.context import ParallelContext
from megatron.planning.calls import Phases
from megatron.planning.rehearsal import World, engine_of, rehearse, run_step
from megatron.planning.saves import SaveCounts, checkpoint_bytes, save_counts
from tests.support.tiny import tiny_run, train, write_tiny_corpus
from tests.unit.planning.test_rehearsal import world_of

ROUTED = {"num_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}


def planned_bytes(world: World) -> int:
    return checkpoint_bytes(rehearse(world, world.representatives()))


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
        (4, {"data_parallel_sharding_strategy": "optim_grads_params", "untie": True}),
        (4, {"expert_model_parallel_size": 2, "use_distributed_optimizer": True} | ROUTED),
    ],
    ids=["tp, pp", "fully sharded", "experts"],
)
def test_a_checkpoint_has_the_tensors_of_one_process(size: int, flags: dict[str, Any]) -> None:
    untie = flags.pop("untie", False)
    model = {key: value for key, value in flags.items() if key in ROUTED}
    model |= {"bf16": True, "untie_embeddings_and_output_weights": untie}
    alone = world_of(1, **model)
    engine = engine_of(alone, ParallelContext.single(), Phases())
    run_step(engine, alone, 1)
    tensors = engine.tensors(optimizer=True)
    expected = sum(sum(part.view.nbytes for part in tensor.parts) for tensor in tensors)
    assert planned_bytes(world_of(size, **flags | model)) == expected


def test_the_files_of_a_save_hold_so_many_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = {"train_iters": 1, "save": str(folder), "bf16": True}
    train(tiny_run(write_tiny_corpus(tmp_path), **flags))
    written = 0
    for file in folder.rglob("*.safetensors"):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        for name, one in header.items():
            if name.startswith(("model/", "optimizer/")):
                first, last = one["data_offsets"]
                written += last - first
    assert written == planned_bytes(world_of(1, **flags))
    weights_alone = planned_bytes(world_of(1, **flags, save_optim=False))
    assert written > 5 * weights_alone  # an fp32 master and two moments for each in bf16


@pytest.mark.parametrize(
    ("flags", "iterations", "counts"),
    [
        ({}, 10, SaveCounts(1, 1, 1)),
        ({"save_interval": 3}, 10, SaveCounts(4, 4, 4)),
        ({"save_interval": 5}, 10, SaveCounts(2, 2, 2)),
        ({"save_interval": 5, "extra_save_iters": (3, 5, 11)}, 10, SaveCounts(3, 3, 3)),
        ({"save_interval": 1, "keep_last": 2}, 10, SaveCounts(10, 2, 3)),
        ({"save_interval": 1, "keep_last": 1, "keep_every": 4}, 10, SaveCounts(10, 3, 4)),
        ({"save_interval": 1, "keep_last": 1, "keep_best": 2}, 10, SaveCounts(10, 3, 4)),
    ],
)
def test_saves_are_counted_with_the_one_being_written(
    flags: dict[str, Any], iterations: int, counts: SaveCounts
) -> None:
    checkpoint = tiny_run("nowhere", save="somewhere", **flags).checkpoint
    assert save_counts(checkpoint, iterations) == counts


def test_without_a_folder_nothing_is_saved() -> None:
    assert save_counts(tiny_run("nowhere").checkpoint, 10) == SaveCounts(0, 0, 0)
