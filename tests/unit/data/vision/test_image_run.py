"""Flags of a run on images: its tokens, its paths, and what a ViT does not have."""

from pathlib import Path
from typing import Any

import pytest

from megatron.config.models.vision import ImagePooling
from megatron.config.run import RunConfig
from megatron.data.vision.image_run import run_of_images
from megatron.errors import ConfigError
from tests.support.vision.images import tiny_vit_run, write_images


def test_the_length_is_that_of_an_image(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of_images(tiny_vit_run("x", log_level="info"))
    assert (run.data.seq_length, run.model.max_position_embeddings) == (17, 17)
    assert "taken as" not in capsys.readouterr().out
    for given in (3136, 16):
        run = run_of_images(tiny_vit_run("x", seq_length=given))
        assert (run.data.seq_length, run.model.max_position_embeddings) == (17, 17)
        said = capsys.readouterr().out
        assert f"--seq-length {given}: taken as 17, because an image has 4 x 4 patches" in said
        assert "and a class token" in said
    mean = tiny_vit_run("x", seq_length=16, image_pooling=ImagePooling.MEAN)
    assert run_of_images(mean).data.seq_length == 16


def paths(run: RunConfig) -> list[tuple[str, ...] | None]:
    data = run_of_images(run).data
    return [data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path]


def test_a_path_that_holds_two_splits_is_taken_as_two(tmp_path: Path) -> None:
    for name in ("train", "val"):
        write_images(tmp_path / name, per_class=1)
    train, valid = f"{tmp_path}/train", f"{tmp_path}/val"
    both = [None, (train,), (valid,), (valid,)]
    assert paths(tiny_vit_run(str(tmp_path))) == both
    assert paths(tiny_vit_run("", data_path=(train, valid))) == both
    assert paths(tiny_vit_run(train)) == [(train,), None, None, None]
    weighted = ("1", train)
    assert paths(tiny_vit_run("", data_path=weighted)) == [weighted, None, None, None]
    blend = ("1", train, "2", valid)
    assert paths(tiny_vit_run("", data_path=blend)) == [blend, None, None, None]


GROUPS = ("all: 1 0:1 x",)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"position_embedding_type": "rope"}, "positions of patches are learned"),
        ({"sliding_window": 4}, "--sliding-window"),
        ({"softmax_type": "off-by-one"}, "--softmax-type"),
        ({"embed_layernorm": True}, "--embed-layernorm"),
        ({"num_experts": 4}, "--num-experts"),
        ({"context_parallel_size": 2}, "not shared over context-parallel ranks"),
        ({"z_loss_coeff": 0.1}, "scores of a vocabulary"),
        ({"data_path": None, "train_weighted_split_paths": GROUPS}, "groups of weighted ranges"),
        (
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            "use --image-pooling mean for 16 tokens",
        ),
    ],
)
def test_what_a_vit_does_not_have_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of_images(tiny_vit_run("x", **flags))
