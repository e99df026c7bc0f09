"""The laws for ViTs: layouts, engines and resumed runs train one model on the same images."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.load.image_positions import interpolated
from megatron.config.models.vision import ImagePooling, VisionConfig, VisionHead
from megatron.errors import ConfigError
from pretrain_vit import run_of_images
from tests.laws.checkpoints.test_resume import FULL, HALF, check_joined
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP32,
    FP64,
    Record,
    assert_all_close,
    assert_close,
    train_vit_all,
    whole,
)
from tests.support.vision.images import AUGMENTED, TINY, tiny_vit_run, write_images

SHAPE: dict[str, Any] = {"num_layers": 4, "eval_iters": 1, "eval_interval": 3}
BY_PATCHES = {"image_pooling": ImagePooling.MEAN, "vision_head": VisionHead.MLP}
RATES = {"layer_lr_decay": 0.7, "head_lr_mult": 3.0}
TP, PP = (f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model"))
# What three steps of a learning rate of 1e-9 change, and interpolation in float32.
FINETUNED = 1e-6
SP = {TP: 2, "sequence_parallel": True}
# With a class token there are 17 tokens, which are shared out by no two ranks; a patch grid of
# 3 x 5 makes 16 of them.
ODD = {"img_h": 6, "img_w": 10}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_images(Path(tmp_path_factory.mktemp("images")), per_class=16)


def check_equal(records: list[Record], alone: Record, tolerance: float) -> None:
    assert_close(records[0].losses, alone.losses, tolerance)
    assert_close(records[0].grad_norms, alone.grad_norms, tolerance)
    for ours, expected in zip(records[0].evaluations, alone.evaluations, strict=True):
        assert_close(ours.means, expected.means, tolerance)
        assert ours.metrics == expected.metrics
    state = {name: t for name, t in whole(records).items() if name.startswith("model/")}
    assert_all_close(state, whole([alone], prefix="model/"), tolerance)


KINDS: dict[str, dict[str, Any]] = {
    "a class token": {**ODD, **AUGMENTED, **RATES, "hidden_dropout": 0.1},
    "the mean of patches": {**BY_PATCHES, "recompute_granularity": "full"},
}
GRIDS: dict[int, list[dict[str, Any]]] = {
    2: [{"micro_batch_size": 2}, {**SP, "micro_batch_size": 4}, {PP: 2, "micro_batch_size": 2}],
    4: [{**SP, PP: 2, "num_virtual_stages_per_pipeline_rank": 2, "micro_batch_size": 2}],
}


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("a class token", 2),
        ("the mean of patches", 2),
        pytest.param("a class token", 4, marks=pytest.mark.wide),
        pytest.param("the mean of patches", 4, marks=pytest.mark.wide),
    ],
)
def test_every_layout_trains_the_same_model(images: str, kind: str, world_size: int) -> None:
    flags = SHAPE | KINDS[kind]
    ((alone,),) = run_on_ranks(1, train_vit_all, [tiny_vit_run(images, **flags)])
    assert len(set(alone.losses)) == len(alone.losses), "the weights are meant to move"
    grids = GRIDS[world_size]
    runs = [tiny_vit_run(images, **(flags | grid)) for grid in grids]
    by_rank = run_on_ranks(world_size, train_vit_all, runs)
    for at in range(len(grids)):
        check_equal([ranks[at] for ranks in by_rank], alone, FP64)


def test_both_engines_train_the_same_model(images: str) -> None:
    flags = SHAPE | RATES | {"fp64": False, "optimizer": "sgd", "lr": 0.05}
    ((alone,),) = run_on_ranks(1, train_vit_all, [tiny_vit_run(images, **flags)])
    grids: list[dict[str, Any]] = [
        {"zero_stage": "3", "micro_batch_size": 2},
        {"zero_stage": "1", PP: 2, "micro_batch_size": 2},
    ]
    runs = [tiny_vit_run(images, deepspeed=True, **flags, **grid) for grid in grids]
    by_rank = run_on_ranks(2, train_vit_all, runs, deepspeed=True)
    for at in range(len(runs)):
        check_equal([ranks[at] for ranks in by_rank], alone, FP32)


def test_a_resumed_run_is_the_uninterrupted_run(images: str, tmp_path: Path) -> None:
    flags = {"fp64": False, "train_iters": FULL, "eval_iters": 1, "eval_interval": 3}
    flags["split"] = "60,20,20"
    plain = tiny_vit_run(images, num_workers=1, hidden_dropout=0.1, **flags, **AUGMENTED, **RATES)
    kept = str(tmp_path / "checkpoints")
    checkpoint = dataclasses.replace(plain.checkpoint, save=kept, load=kept)
    stopping = dataclasses.replace(plain.training, exit_interval=HALF)
    saving = dataclasses.replace(plain, checkpoint=checkpoint, training=stopping)
    loading = dataclasses.replace(plain, checkpoint=checkpoint)
    straight, first = run_on_ranks(1, train_vit_all, [plain, saving])[0]
    (second,) = run_on_ranks(1, train_vit_all, [loading])[0]
    check_joined(straight, first, second, "a ViT")


def test_every_layout_begins_with_positions_of_another_size(images: str, tmp_path: Path) -> None:
    kept = str(tmp_path / "checkpoints")
    small = tiny_vit_run(images, num_layers=4, save=kept, **BY_PATCHES)
    ((trained,),) = run_on_ranks(1, train_vit_all, [small])
    flags: dict[str, Any] = {"num_layers": 4, "lr": 1e-9, "load": kept, "finetune": True}
    larger = {**flags, **BY_PATCHES, "img_h": 12}
    ((alone,),) = run_on_ranks(1, train_vit_all, [tiny_vit_run(images, **larger)])
    vision = [VisionConfig(**TINY, image_pooling=ImagePooling.MEAN, img_h=h) for h in (None, 12)]
    name = "model/embedding.position.weight"
    table = interpolated(whole([trained])[name], *vision)
    assert_all_close({name: whole([alone])[name]}, {name: table}, FINETUNED)
    grids = [{**SP, "micro_batch_size": 4}, {PP: 2, "micro_batch_size": 2}]
    by_rank = run_on_ranks(
        2, train_vit_all, [tiny_vit_run(images, **(larger | grid)) for grid in grids]
    )
    for at in range(len(grids)):
        check_equal([ranks[at] for ranks in by_rank], alone, FP64)


def test_tokens_that_ranks_cannot_share_are_refused(images: str) -> None:
    with pytest.raises(ConfigError, match="do not divide over tensor-parallel ranks") as refused:
        run_of_images(tiny_vit_run(images, **SP))
    assert "17 tokens" in str(refused.value)
    assert "--image-pooling mean" in str(refused.value)
