"""ViT against the one of transformers, its patches, its loss, and its counts of right answers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from megatron.config.models.vision import ImagePooling, VisionConfig, VisionHead
from megatron.model.vit_model import VitModel, count_of_top, image_loss, patches_of
from tests.support.models import roughen, tiny_build, tiny_config

# float64 on both sides: only the order of additions differs.
SAME = {"rtol": 1e-10, "atol": 1e-10}
IMAGE = {"num_classes": 5, "img_h": 6, "img_w": 10, "patch_dim": 2}


def tiny_vit(**flags: Any) -> VitModel:
    """A ViT of two layers with rough values."""
    config = tiny_config(onnx_safe=True, layernorm_epsilon=1e-12)
    build = tiny_build(seq_length=16)
    model = VitModel(config, build, VisionConfig(**(IMAGE | flags)))
    roughen(model, build.ctx)
    return model.eval()


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 6, 10, generator=torch.Generator().manual_seed(2)).double()


def theirs(ours: VitModel) -> ViTForImageClassification:
    """The same weights in the ViT of transformers, in float64."""
    config = ours.config
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            intermediate_size=config.ffn_width,
            layer_norm_eps=config.layernorm_epsilon,
            image_size=(6, 10),
            patch_size=2,
            num_labels=5,
            attn_implementation="sdpa",
        )
    ).double()
    state = {}
    for key, value in model.state_dict().items():
        state[key] = _ours_of(key, ours.state_dict(), config.num_attention_heads).view_as(value)
    model.load_state_dict(state)
    return model.eval()


def _ours_of(key: str, state: dict[str, Tensor], heads: int) -> Tensor:
    names = {
        "vit.embeddings.cls_token": "embedding.class_token",
        "vit.embeddings.position_embeddings": "embedding.position.weight",
        "vit.embeddings.patch_embeddings.projection.weight": "embedding.patch.weight",
        "vit.embeddings.patch_embeddings.projection.bias": "embedding.patch.bias",
        "vit.layernorm.weight": "final_norm.weight",
        "vit.layernorm.bias": "final_norm.bias",
        "classifier.weight": "classification_head.dense.weight",
        "classifier.bias": "classification_head.dense.bias",
    }
    if key in names:
        return state[names[key]]
    layer, part, leaf = _split(key)
    if part in ("q", "k", "v"):
        qkv = state[f"layers.{layer}.attention.qkv.{leaf}"]
        by_head = qkv.view(heads, 3, -1, *qkv.shape[1:])
        return by_head[:, "qkv".index(part)].reshape(-1, *qkv.shape[1:])
    return state[f"layers.{layer}.{part}.{leaf}"]


def _split(key: str) -> tuple[str, str, str]:
    """The layer, our part (or q, k, v) and the leaf of a key of transformers."""
    words = key.split(".")
    layer = next(word for word in words if word.isdigit())
    parts = {
        "query": "q",
        "q_proj": "q",
        "key": "k",
        "k_proj": "k",
        "value": "v",
        "v_proj": "v",
        "o_proj": "attention.output",
        "layernorm_before": "input_norm",
        "layernorm_after": "post_attention_norm",
        "fc1": "mlp.fc1",
        "fc2": "mlp.fc2",
    }
    return layer, parts[words[-2]], words[-1]


def test_scores_are_those_of_transformers() -> None:
    ours = tiny_vit()
    reference = theirs(ours)
    expected = reference(images()).logits
    torch.testing.assert_close(ours(images()), expected, **SAME)
    with torch.no_grad():
        token = ours.get_parameter("embedding.class_token")
        token.copy_(token.roll(1))
    assert not torch.allclose(ours(images()), expected, **SAME)


def test_patches_are_what_a_convolution_sees() -> None:
    weight = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    rows = patches_of(images(), 2)
    assert rows.shape == (15, 3, 12)
    expected = F.conv2d(images(), weight, stride=2).flatten(2).permute(2, 0, 1)
    torch.testing.assert_close(F.linear(rows, weight.flatten(1)), expected, **SAME)


def test_the_mean_of_patches_is_scored_without_a_class_token() -> None:
    model = tiny_vit(image_pooling=ImagePooling.MEAN, vision_head=VisionHead.MLP)
    assert "embedding.class_token" not in model.state_dict()
    assert model.get_parameter("embedding.position.weight").shape[0] == 15
    with torch.no_grad():
        model.get_parameter("embedding.position.weight").zero_()
    # Without positions the order of patches means nothing to a mean; that of pixels does.
    moved = images().view(3, 3, 3, 2, 5, 2).flip(2).flip(4).reshape(3, 3, 6, 10)
    torch.testing.assert_close(model(moved), model(images()), **SAME)
    assert not torch.allclose(model(images().flip(2)), model(images()), **SAME)


def test_the_loss_is_a_cross_entropy_with_two_classes_and_smoothing() -> None:
    scores = torch.randn(4, 5, dtype=torch.float64)
    targets = torch.tensor([[0, 0], [1, 1], [2, 4], [3, 0]])
    shares = torch.tensor([[1, 0], [1, 0.1], [0.3, 0], [0.6, 0.1]], dtype=torch.float64)
    found = image_loss(scores, targets, shares)
    expected = torch.zeros((), dtype=torch.float64)
    for row, (one, other), (share, smoothing) in zip(scores, targets, shares.tolist()):
        target = share * F.one_hot(one, 5).double() + (1 - share) * F.one_hot(other, 5).double()
        target = (1 - smoothing) * target + smoothing / 5
        expected = expected + F.cross_entropy(row, target)
    torch.testing.assert_close(found.total, expected, **SAME)
    assert found.count == 4
    plain = image_loss(scores.half(), targets[:, :1].expand(4, 2), torch.tensor([[1.0, 0]] * 4))
    assert plain.total.dtype == torch.float32


def test_the_highest_scores_are_counted_and_equal_ones_in_their_order() -> None:
    scores = torch.tensor([[3.0, 2, 1], [1, 2, 3], [1, 1, 1], [1, 1, 1]])
    targets = torch.tensor([[0, 2], [0, 0], [0, 0], [2, 2]])
    counts = [int(count_of_top(k, scores, targets).total) for k in (1, 2, 3)]
    assert counts == [2, 2, 4]
    assert count_of_top(1, scores, targets).count == 4


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_class_without_a_share_changes_nothing(share: float) -> None:
    scores = torch.randn(2, 5, dtype=torch.float64)
    shares = torch.tensor([[share, 0.0]] * 2, dtype=torch.float64)
    kept = 0 if share else 1
    targets = torch.tensor([[1, 2], [3, 4]])
    other = targets.clone()
    other[:, 1 - kept] = 0
    assert image_loss(scores, targets, shares).total == image_loss(scores, other, shares).total
