"""ViT for the classification of images (Dosovitskiy et al. 2020, arXiv 2010.11929).

What a reader would get wrong: files keep the patches' matrix as the weights of a convolution, and
positions and the class token with dimensions of 1 before; the means and deviations that pixels are
normalised with stand in preprocessor_config.json, not in config.json.
"""

from collections.abc import Sequence

from megatron.checkpoint.formats.huggingface.families.gpt2 import (
    ACTIVATION_NAMES,
    GPT2,
    PLAIN_ACTIVATIONS,
)
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.checkpoint.formats.huggingface.layouts import QkvApart, Reshaped, Same, TensorRule
from megatron.checkpoint.model_kind import VIT as VIT_KIND
from megatron.config.model import ModelConfig
from megatron.config.models.vision import ImagePooling, VisionConfig, VisionHead
from megatron.errors import CheckpointError, ConfigError
from megatron.json_values import JsonValue

_SIDES = 2  # of an image, height before width


def _read(fields: Fields) -> dict[str, object]:
    fields.must_be("qkv_bias", True, True, why="queries, keys and values without biases")
    for name in ("encoder_stride", "pooler_act", "pooler_output_size"):
        fields.get(name, None)  # of other heads than that of classes
    return {
        "num_layers": fields.integer("num_hidden_layers", 12),
        "hidden_size": fields.integer("hidden_size", 768),
        "num_attention_heads": fields.integer("num_attention_heads", 12),
        "ffn_hidden_size": fields.integer("intermediate_size", 3072),
        "layernorm_epsilon": fields.number("layer_norm_eps", 1e-12),
        "hidden_dropout": fields.number("hidden_dropout_prob", 0.0),
        "attention_dropout": fields.number("attention_probs_dropout_prob", 0.0),
        **fields.choice("hidden_act", PLAIN_ACTIVATIONS, "gelu"),
    }


def _sizes(fields: Fields) -> Sizes:
    height, width = _image_size(fields)
    labels = len(fields.mapping("id2label"))
    fields.mapping("label2id")
    try:
        vision = VisionConfig(
            num_classes=labels or fields.integer("num_labels", 2),
            img_h=height,
            img_w=width,
            num_channels=fields.integer("num_channels", 3),
            patch_dim=fields.integer("patch_size", 16),
        )
    except ConfigError as error:
        raise CheckpointError(
            f"the images of a Hugging Face folder are none that a ViT here reads: {error.problem}",
            found=f"{fields.path}: {error.found}",
            fix="such a model cannot be converted",
        ) from error
    return Sizes(0, vision.num_tokens, vision=vision)


def _image_size(fields: Fields) -> tuple[int, int]:
    value = fields.get("image_size", 224)
    sides = [value, value] if isinstance(value, int) else value
    if (
        not isinstance(sides, Sequence)
        or len(sides) != _SIDES
        or any(type(side) is not int or side < 1 for side in sides)
    ):
        raise fields.wrong_kind("image_size", value, "a whole number above 0, or two of them")
    return sides[0], sides[1]


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    vision = vision_of(sizes)
    classes = range(vision.num_classes)
    sides: list[JsonValue] = [vision.height, vision.width]
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_width,
        "hidden_act": ACTIVATION_NAMES[config.activation],
        "layer_norm_eps": config.layernorm_epsilon,
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "image_size": sides if vision.height != vision.width else vision.height,
        "patch_size": vision.patch_dim,
        "num_channels": vision.num_channels,
        "qkv_bias": True,
        "id2label": {str(at): f"LABEL_{at}" for at in classes},
        "label2id": {f"LABEL_{at}": at for at in classes},
    }


def vision_of(sizes: Sizes) -> VisionConfig:
    """Return the flags of images of a model that has some."""
    assert sizes.vision is not None  # noqa: S101  # invariant: it is a ViT
    return sizes.vision


def refuse_other_heads(vision: VisionConfig) -> None:
    """Raise CheckpointError where transformers scores classes in another way."""
    problems = []
    if vision.image_pooling is not ImagePooling.CLASS_TOKEN:
        problems.append(f"--image-pooling {vision.image_pooling} (vit has class_token)")
    if vision.vision_head is not VisionHead.LINEAR:
        problems.append(f"--vision-head {vision.vision_head} (vit has linear)")
    if problems:
        raise CheckpointError(
            "no family of Hugging Face models computes what this model does",
            found="; ".join(problems),
            fix="such a model cannot be exported; its checkpoint stays as it is",
        )


def preprocessor_config(vision: VisionConfig) -> dict[str, JsonValue]:
    """Return the preprocessor_config.json with which transformers prepares the same pixels."""
    mean: list[JsonValue] = [*vision.mean]
    std: list[JsonValue] = [*vision.std]
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": vision.height, "width": vision.width},
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }


def _tensors() -> dict[str, TensorRule]:
    block, there = "layers.{}.", "encoder.layer.{}."
    rules: dict[str, TensorRule] = {
        "embedding.class_token": Reshaped("embeddings.cls_token", ones=2),
        "embedding.position.weight": Reshaped("embeddings.position_embeddings", ones=1),
        "embedding.patch.weight": Reshaped("embeddings.patch_embeddings.projection.weight"),
        "embedding.patch.bias": Same("embeddings.patch_embeddings.projection.bias"),
    }
    same = {
        f"{block}input_norm": f"{there}layernorm_before",
        f"{block}attention.output": f"{there}attention.output.dense",
        f"{block}post_attention_norm": f"{there}layernorm_after",
        f"{block}mlp.fc1": f"{there}intermediate.dense",
        f"{block}mlp.fc2": f"{there}output.dense",
        "final_norm": "layernorm",
        "classification_head.dense": "classifier",
    }
    for leaf in ("weight", "bias"):
        rules |= {f"{ours}.{leaf}": Same(f"{hf_name}.{leaf}") for ours, hf_name in same.items()}
        query, key, value = (
            f"{there}attention.attention.{part}.{leaf}" for part in ("query", "key", "value")
        )
        rules[f"{block}attention.qkv.{leaf}"] = QkvApart((query, key, value))
    return rules


VIT = Family(
    model_type="vit",
    architecture="ViTForImageClassification",
    prefix="vit.",
    head=(),
    supported=GPT2.supported,
    tensors=_tensors(),
    buffers=(),
    read_config=_read,
    read_sizes=_sizes,
    write_config=_write,
    plain_heads=True,
    kinds=(VIT_KIND,),
    above=("classifier.",),
)
