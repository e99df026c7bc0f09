"""Names and shapes of every tensor of a ViT, from its config and the flags of its images.

Like `gpt_tensors` for GPTs, whose blocks it has; a test compares them with the model itself.
"""

from megatron.checkpoint.gpt_tensors import (
    HEAD,
    POSITION_TABLE,
    WORD_TABLE,
    Shapes,
    gpt_tensors,
    linear_shapes,
)
from megatron.config.model import ModelConfig
from megatron.config.models.vision import VisionConfig, VisionHead

CLASS_TOKEN, PATCHES = "embedding.class_token", "embedding.patch"  # no password
CLASSES, HIDDEN_LAYER = "classification_head.dense", "classification_head.hidden"


def vit_tensors(config: ModelConfig, vision: VisionConfig) -> Shapes:
    """Return whole shapes by global name (without `model/`), in the order of the model."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if vision.has_class_token:
        shapes[CLASS_TOKEN] = (hidden,)
    shapes |= linear_shapes(PATCHES, hidden, vision.patch_values, bias=True)
    shapes[POSITION_TABLE] = (vision.num_tokens, hidden)
    blocks = gpt_tensors(config, vocab_rows=1, positions=vision.num_tokens)
    shapes |= {
        name: shape
        for name, shape in blocks.items()
        if name not in (WORD_TABLE, POSITION_TABLE, HEAD)
    }
    if vision.vision_head is VisionHead.MLP:
        shapes |= linear_shapes(HIDDEN_LAYER, hidden, hidden, bias=True)
    return shapes | dict(linear_shapes(CLASSES, vision.num_classes, hidden, bias=True))
