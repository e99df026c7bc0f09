"""ViTs that `transformers` writes are read to the same scores, and written to the same bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from megatron.checkpoint.boxes import Box, whole
from megatron.checkpoint.formats.huggingface.families.vit import preprocessor_config
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.huggingface.writer import write_huggingface
from megatron.checkpoint.formats.native.source import ShardedSource, write_sharded
from megatron.checkpoint.source import CheckpointSource, SourceOptions, WriteOptions
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.config.models.vision import VisionConfig
from megatron.config.precision import PrecisionConfig
from megatron.data.vision.augment import centred
from megatron.data.vision.image_dataset import normalised
from megatron.errors import CheckpointError
from megatron.model.vit_model import VitModel
from tests.support.models import tiny_build
from tests.support.vision.images import image

# float32, over sums of a few dozen terms of either program; any error moves scores by far more.
SAME = 1e-5
WRONG = 10 * SAME
CASES: dict[str, dict[str, Any]] = {
    "square": {"image_size": 8, "patch_size": 2},
    "wide, gray, tanh": {
        **{"image_size": [4, 8], "patch_size": 4, "num_channels": 1},
        **{"hidden_act": "gelu_new", "layer_norm_eps": 1e-6},
    },
}


def save_vit(case: str, folder: Path) -> ViTForImageClassification:
    """Write a ViT of two layers with rough values, five classes."""
    torch.manual_seed(len(case))
    labels = {number: f"LABEL_{number}" for number in range(5)}
    config = ViTConfig(
        **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"intermediate_size": 24, "id2label": labels},
        **CASES[case],
    )
    model = ViTForImageClassification(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value) * 0.4)
    model.save_pretrained(folder)
    return model


def opened(folder: Path) -> HuggingFaceSource:
    return HuggingFaceSource(folder, SourceOptions(vocab_size=1))


def scores_of(source: CheckpointSource, pixels: Tensor, **changes: Any) -> Tensor:
    config = from_plain(ModelConfig, dict(source.config["model"]) | changes)
    vision = from_plain(VisionConfig, source.config["vision"])
    model = VitModel(config, tiny_build(precision=PrecisionConfig()), vision).eval()
    names = [name for name, _ in model.named_parameters()]
    assert {f"model/{name}" for name in names} == source.tensors.keys()
    for name, parameter in model.named_parameters():
        found = source.read(f"model/{name}", whole(parameter.shape))
        parameter.data.copy_(found)
    with torch.no_grad():
        return model(pixels)


def some_pixels(model: ViTForImageClassification) -> Tensor:
    sizes = model.config.image_size
    height, width = (sizes, sizes) if isinstance(sizes, int) else sizes
    return torch.randn(3, model.config.num_channels, height, width)


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = save_vit(case, tmp_path)
    pixels = some_pixels(model)
    with torch.no_grad():
        expected = model(pixels).logits
    with opened(tmp_path) as source:
        assert (source.kind, source.format_name) == ("vit", "huggingface")
        assert float((scores_of(source, pixels) - expected).abs().max()) <= SAME
        assert expected.abs().max() > 0.1
        other = not source.config["model"]["onnx_safe"]
        wrong = scores_of(source, pixels, onnx_safe=other, openai_gelu=False)
        assert float((wrong - expected).abs().max()) > WRONG


@pytest.mark.parametrize(
    "one",
    ["embeddings.cls_token", "encoder.layer.1.attention.attention.key.weight", "layernorm.bias"],
)
def test_a_tensor_that_is_read_wrongly_shows_in_the_scores(one: str, tmp_path: Path) -> None:
    model = save_vit("square", tmp_path)
    tensors: dict[str, Tensor] = load_file(tmp_path / "model.safetensors")
    key = f"vit.{one}"
    tensors[key] = tensors[key].flip(-1).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    pixels = some_pixels(model)
    with opened(tmp_path) as source, torch.no_grad():
        wrong = scores_of(source, pixels) - model(pixels).logits
    assert float(wrong.abs().max()) > WRONG


def test_parts_of_reshaped_tensors_are_read(tmp_path: Path) -> None:
    save_vit("square", tmp_path)
    with opened(tmp_path) as source:
        for name in ("embedding.patch.weight", "embedding.position.weight"):
            shape = source.tensors[f"model/{name}"].global_shape
            every = source.read(f"model/{name}", whole(shape))
            part = source.read(f"model/{name}", Box((3, 2), (4, 5)))
            assert torch.equal(part, every[3:7, 2:7])
            assert source.range_of(f"model/{name}") is None


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_through_our_own_format_keeps_every_bit(case: str, tmp_path: Path) -> None:
    save_vit(case, tmp_path / "there")
    with opened(tmp_path / "there") as source:
        ours = write_sharded(source, tmp_path / "ours")
    with ShardedSource(ours) as source:
        assert source.kind == "vit"
        write_huggingface(source, tmp_path / "back", WriteOptions())
    there, back = (load_file(tmp_path / name / "model.safetensors") for name in ("there", "back"))
    assert there.keys() == back.keys()
    assert all(torch.equal(value, back[key]) for key, value in there.items())
    again = ViTForImageClassification.from_pretrained(tmp_path / "back")
    before = json.loads((tmp_path / "there" / "config.json").read_text())
    after = json.loads((tmp_path / "back" / "config.json").read_text())
    same = ("image_size", "patch_size", "num_channels", "hidden_act", "layer_norm_eps", "id2label")
    assert all(after[name] == before[name] for name in same)
    assert again.config.num_labels == 5


def test_pixels_are_prepared_as_transformers_does(tmp_path: Path) -> None:
    vision = VisionConfig(img_dim=8, patch_dim=2, image_mean=(0.4, 0.5, 0.6), image_std=(0.2,))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor_config(vision)))
    processor = ViTImageProcessor.from_pretrained(tmp_path)
    theirs = processor(image(1, 2), return_tensors="pt")["pixel_values"][0]
    ours = torch.from_numpy(normalised(centred(image(1, 2), vision), vision))
    torch.testing.assert_close(theirs.double(), ours, rtol=SAME, atol=SAME)


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"image_pooling": "mean"}, "--image-pooling mean"),
        ({"vision_head": "mlp"}, "--vision-head mlp"),
    ],
)
def test_what_transformers_does_not_compute_is_refused(
    vision: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_vit("square", tmp_path / "there")

    class Changed(HuggingFaceSource):
        @property
        def config(self) -> Any:
            found = super().config
            return {**found, "vision": {**found["vision"], **vision}}

    with (
        Changed(tmp_path / "there", SourceOptions()) as source,
        pytest.raises(CheckpointError, match=message),
    ):
        write_huggingface(source, tmp_path / "back", WriteOptions())
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("qkv_bias", False, "queries, keys and values without biases"),
        ("image_size", "large", "a whole number above 0, or two of them"),
        ("image_size", 9, "patches do not fill an image"),
        ("hidden_act", "mish", "'hidden_act' is 'mish'"),
        ("num_channels", 4, "one channel or three"),
    ],
)
def test_a_config_of_another_model_is_refused(
    field: str, value: object, message: str, tmp_path: Path
) -> None:
    save_vit("square", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path)


def test_another_number_of_classes_than_the_config_says_is_refused(tmp_path: Path) -> None:
    save_vit("square", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["id2label"]["4"]
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"classifier.weight is \[5, 16\]"):
        opened(tmp_path)
