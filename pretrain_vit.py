"""Pretrain a ViT to classify images: `torchrun --nproc-per-node N pretrain_vit.py <flags>`.

What is here is what makes it a ViT: images, layers, batch and loss, as one `PretrainTask`. There is
no text, so no tokenizer has to be named, and the length of sequences follows from the images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.command import pretrain_from_flags
from megatron.program import run_program

if TYPE_CHECKING:
    from megatron.config.models.vision import VisionConfig
    from megatron.config.run import RunConfig
    from megatron.engine.base import PretrainTask


# What flags about text are where none are given: of a vocabulary that nothing reads.
DEFAULTS = {"seq_length": 1, "vocab_size": 1}
TOKENIZER_TYPE = "NullTokenizer"


def program() -> None:
    """Train, and end with the exit status of the outcome; also installed as a command."""
    run_program(main)


def main() -> None:
    """Read the flags, then train."""
    pretrain_from_flags(
        lambda config: vit_task(config.vision),
        tokenizer_type=TOKENIZER_TYPE,
        defaults=DEFAULTS,
        adapted=run_of_images,
    )


def run_of_images(config: RunConfig) -> RunConfig:
    """Return the run as its flags mean it for images."""
    from megatron.data.vision import image_run

    return image_run.run_of_images(config)


def vit_task(vision: VisionConfig) -> PretrainTask:
    """Return the task of a ViT: its images, its layers and its loss."""
    from functools import partial

    import torch
    from torch import Tensor

    from megatron.checkpoint.model_kind import VIT
    from megatron.config.model import ModelConfig
    from megatron.data.loading.columns import columns
    from megatron.data.vision.image_maker import image_data
    from megatron.engine.base import BatchOptions, MicroBatch, PretrainTask, RawBatch
    from megatron.engine.datasets import datasets_of
    from megatron.model.accounting import vit_flops_per_token
    from megatron.model.losses import LossSum
    from megatron.model.specs import Carry, ModelBuild, TokenFlops
    from megatron.model.vit_model import count_of_top, image_loss, vit_layers

    reads = image_data(vision)

    def batch(raw: RawBatch, options: BatchOptions) -> MicroBatch:
        """Return the loader's batch as the arguments of the model and of the loss."""
        image, targets, shares = columns(raw, "image", "targets", "shares")
        return MicroBatch(inputs=(image,), labels=(targets, shares))

    def loss(carry: Carry, labels: Carry, build: ModelBuild) -> LossSum:
        """Return the cross entropy of the classes."""
        return image_loss(carry[0], *labels)

    def counted(labels: Carry) -> Tensor:
        """Return the number of images."""
        return torch.tensor(float(len(labels[0])), device=labels[0].device)

    def accuracy(carry: Carry, labels: Carry) -> LossSum:
        """Return how many images have their class scored highest."""
        return count_of_top(1, carry[0], labels[0])

    def flops(config: ModelConfig, build: ModelBuild) -> TokenFlops:
        """Return the FLOPs of a token."""
        return vit_flops_per_token(
            config,
            vision,
            recompute=build.activations,
            virtual_stages=build.virtual_stages,
        )

    return PretrainTask(
        name=VIT,
        reads=reads,
        datasets=datasets_of(reads),
        layers=partial(vit_layers, vision=vision),
        batch=batch,
        loss=loss,
        counted=counted,
        flops_per_token=flops,
        losses=("classification loss",),
        metrics={"accuracy": accuracy},
        begins_with=(VIT,),
    )


if __name__ == "__main__":
    program()
