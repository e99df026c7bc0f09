"""Positions of images of another size: as transformers interpolates them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ViTConfig, ViTModel

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.load.image_positions import interpolated, with_saved_positions
from megatron.checkpoint.sharded import ShardedTensor, ShardPart
from megatron.config.fields import to_plain
from megatron.config.models.vision import ImagePooling, VisionConfig

NAME = "model/embedding.position.weight"
# float32.
SAME = {"rtol": 1e-5, "atol": 1e-6}
SMALL, LARGE = (
    VisionConfig(img_h=height, img_w=width, patch_dim=2) for height, width in ((6, 8), (10, 4))
)


def a_table(vision: VisionConfig) -> Tensor:
    return torch.randn(vision.num_tokens, 3, generator=torch.Generator().manual_seed(1))


def test_a_grid_is_interpolated_as_transformers_does_it() -> None:
    sizes: dict[str, Any] = {"num_attention_heads": 1, "num_hidden_layers": 1, "hidden_size": 3}
    square = VisionConfig(img_dim=6, patch_dim=2)  # as transformers takes all of them to be
    model = ViTModel(ViTConfig(image_size=6, patch_size=2, intermediate_size=4, **sizes))
    table = a_table(square)
    embeddings = model.embeddings
    embeddings.position_embeddings.data.copy_(table)
    hidden = torch.zeros(1, LARGE.num_tokens, 3)
    expected = embeddings.interpolate_pos_encoding(hidden, LARGE.height, LARGE.width)[0]
    found = interpolated(table, square, LARGE)
    torch.testing.assert_close(found, expected, **SAME)
    assert torch.equal(found[0], table[0]), "the class token has no place in the grid"


def test_a_table_keeps_its_dtype_and_may_have_no_class_token() -> None:
    mean = [
        VisionConfig(img_dim=side, patch_dim=2, image_pooling=ImagePooling.MEAN) for side in (4, 8)
    ]
    found = interpolated(a_table(mean[0]).double(), *mean)
    assert (found.shape, found.dtype) == ((16, 3), torch.float64)


def an_opened(saved: dict[str, Any], shape: tuple[int, ...]) -> Any:
    tensors = {NAME: SimpleNamespace(global_shape=shape)}
    return SimpleNamespace(manifest=SimpleNamespace(config={"vision": saved}, tensors=tensors))


@pytest.mark.parametrize("rows", [slice(0, 11), slice(3, 7)])
def test_each_rank_gets_its_part_of_the_scaled_table(rows: slice) -> None:
    own = torch.zeros(rows.stop - rows.start, 3)
    part = ShardPart(Box((rows.start, 0), tuple(own.shape)), own)
    target = ShardedTensor(NAME, (LARGE.num_tokens, 3), own.dtype, (part,))
    opened = an_opened(to_plain(SMALL), (SMALL.num_tokens, 3))
    (read,), fill = with_saved_positions(opened, [target], LARGE)
    assert read.global_shape == (SMALL.num_tokens, 3)
    read.parts[0].view.copy_(a_table(SMALL))
    fill()
    assert torch.equal(own, interpolated(a_table(SMALL), SMALL, LARGE)[rows])


@pytest.mark.parametrize(
    "other", [SMALL, VisionConfig(img_h=6, img_w=8, patch_dim=2, num_classes=2)]
)
def test_tables_that_fit_are_read_as_they_are(other: VisionConfig) -> None:
    target = ShardedTensor.of(NAME, a_table(SMALL))
    opened = an_opened(to_plain(SMALL), (SMALL.num_tokens, 3))
    found, _ = with_saved_positions(opened, [target], other)
    assert found == [target]
