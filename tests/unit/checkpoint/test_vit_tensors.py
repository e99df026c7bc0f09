"""The tensors of a ViT are those of the model itself."""

import pytest

from megatron.checkpoint.vit_tensors import vit_tensors
from megatron.config.models.vision import ImagePooling, VisionConfig, VisionHead
from megatron.model.vit_model import VitModel
from tests.support.models import tiny_build, tiny_config


@pytest.mark.parametrize("pooling", ImagePooling)
@pytest.mark.parametrize("head", VisionHead)
def test_names_and_shapes_are_those_of_the_model(pooling: ImagePooling, head: VisionHead) -> None:
    vision = VisionConfig(
        img_dim=8, patch_dim=2, num_classes=3, image_pooling=pooling, vision_head=head
    )
    model = VitModel(tiny_config(), tiny_build(), vision)
    expected = {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert list(vit_tensors(tiny_config(), vision).items()) == list(expected.items())
