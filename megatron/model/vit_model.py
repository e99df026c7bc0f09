"""ViT written down once, as a list (Dosovitskiy et al. 2020, arXiv 2010.11929).

Images become tokens, one for each patch; all tokens see each other, and one vector of an image is
scored for its class. What a reader would get wrong: the class token is the first of the sequence,
so that under sequence parallelism the first tensor-parallel rank has one patch less.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.models.vision import VisionConfig, VisionHead
from megatron.model.dropout import HiddenDropout
from megatron.model.geometry import AttentionGeometry
from megatron.model.heads import Dense, first_token
from megatron.model.init import table_init
from megatron.model.losses import LossSum
from megatron.model.norms import build_norm
from megatron.model.positions import LearnedPositions
from megatron.model.specs import Carry, LayerSpec, ModelBuild
from megatron.model.stage import assemble, run_layers
from megatron.model.transformer import Block, block_layers
from megatron.mpu.mappings import reduce_from_tp, sequence_part
from megatron.mpu.partition import set_parameter_metadata


def vit_layers(
    config: ModelConfig, build: ModelBuild, *, vision: VisionConfig
) -> tuple[LayerSpec, ...]:
    """Return the whole of a ViT, in order: embedding, blocks, final norm, pooling, head.

    The carry goes in as (images [b, c, height, width],) and comes out as (scores [b, classes],).
    """
    geometry = AttentionGeometry(config, build, causal=False)
    return (
        LayerSpec("embedding", partial(ImageEmbedding, config, build, vision)),
        *block_layers(partial(Block, config, build, geometry), config.num_layers, build),
        LayerSpec("final_norm", partial(build_norm, config, build), call="final"),
        LayerSpec("image_pooler", partial(ImagePooler, build, vision)),
        LayerSpec("classification_head", partial(ImageHead, config, build, vision)),
    )


class ImageEmbedding(nn.Module):
    """Patches times a matrix, a class token before them (optional), positions, then dropout."""

    def __init__(self, config: ModelConfig, build: ModelBuild, vision: VisionConfig) -> None:
        super().__init__()
        self._build, self._vision = build, vision
        self.patch = Dense(vision.patch_values, config.hidden_size, config, build)
        self.class_token: nn.Parameter | None = None
        if vision.has_class_token:
            self.class_token = nn.Parameter(torch.empty(config.hidden_size, dtype=build.dtype))
            set_parameter_metadata(
                self.class_token,
                init=table_init(config),
                sequence_parallel=build.sequence_parallel,
            )
        self.position = LearnedPositions(
            vision.num_tokens,
            config.hidden_size,
            init=table_init(config),
            sequence_parallel=build.sequence_parallel,
            dtype=build.dtype,
        )
        self.dropout = HiddenDropout(config.hidden_dropout, build, "embedding")

    def forward(self, carry: Carry) -> Carry:
        """Map (images [b, c, height, width],) to (hidden [s, b, h],).

        Under sequence parallelism hidden is [s/tp, b, h].
        """
        rows = patches_of(carry[0].to(self._build.dtype), self._vision.patch_dim)
        if self.class_token is not None:
            rows = F.pad(rows, (0, 0, 0, 0, 1, 0))  # a row of zeros, where the class token stands
        length = len(rows)
        part = slice(0, length)
        if self._build.sequence_parallel:
            part = sequence_part(length, self._build.ctx.tp)
        hidden: Tensor = self.patch(rows[part])
        if self.class_token is not None:
            # On every rank, so that each has a gradient of it, if only of zeros.
            numbers = torch.arange(length, device=rows.device)[part]
            hidden = torch.where((numbers == 0)[:, None, None], self.class_token, hidden)
        hidden = hidden + self.position(length, None, part)
        return (self.dropout(hidden).to(self._build.stream_dtype),)


def patches_of(images: Tensor, size: int) -> Tensor:
    """Return the patches of images [b, c, height, width], row by row: [patches, b, c size size].

    The numbers of a patch are in the order of a convolution's weights.
    """
    batch, channels, height, width = images.shape
    cut = images.view(batch, channels, height // size, size, width // size, size)
    ordered = cut.permute(2, 4, 0, 1, 3, 5)
    return ordered.reshape(-1, batch, channels * size * size)


class ImagePooler(nn.Module):
    """One vector for an image: its class token, or the mean of its patches. Has no parameters."""

    def __init__(self, build: ModelBuild, vision: VisionConfig) -> None:
        super().__init__()
        self._tp, self._split = build.ctx.tp, build.sequence_parallel
        self._takes_first, self._length = vision.has_class_token, vision.num_tokens

    def forward(self, carry: Carry) -> Carry:
        """Map (hidden [s, b, h],) to (pooled [b, h],); under sequence parallelism [s/tp, b, h]."""
        hidden = carry[0]
        if self._takes_first:
            return (first_token(hidden, self._tp, split=self._split),)
        total = hidden.sum(0)
        if self._split:
            total = reduce_from_tp(total, self._tp)
        return (total / self._length,)


class ImageHead(nn.Module):
    """Scores of classes for the pooled vector of an image; every tp rank computes all of them."""

    def __init__(self, config: ModelConfig, build: ModelBuild, vision: VisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.hidden = None
        if vision.vision_head is VisionHead.MLP:
            self.hidden = Dense(width, width, config, build, whole=True)
        self.dense = Dense(width, vision.num_classes, config, build, whole=True)

    def forward(self, carry: Carry) -> Carry:
        """Map (pooled [b, h],) to (scores [b, classes],)."""
        pooled = carry[0]
        if self.hidden is not None:
            pooled = torch.tanh(self.hidden(pooled))
        return (self.dense(pooled),)


def image_loss(scores: Tensor, targets: Tensor, shares: Tensor) -> LossSum:
    """Return the sum of `image_losses` over the images, and their number."""
    total = image_losses(scores, targets, shares).sum()
    return LossSum(total, torch.full_like(total, len(targets)))


def image_losses(scores: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
    """Return the cross entropy of the classes of each image, [b] in fp32 or wider.

    Args:
        scores: [b, classes].
        targets: [b, 2] int64, two classes of each image, which differ where images are mixed.
        shares: [b, 2], the share of the first class among them, and the share of the whole target
            that all classes have equally (Szegedy et al. 2015, arXiv 1512.00567, section 7).
    """
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    logs = torch.log_softmax(wide, dim=-1)
    first, smoothing = shares.to(wide.dtype).unbind(1)
    of_both = logs.gather(1, targets)
    of_targets = first * of_both[:, 0] + (1 - first) * of_both[:, 1]
    return -((1 - smoothing) * of_targets + smoothing * logs.mean(dim=-1))


def count_of_top(k: int, scores: Tensor, targets: Tensor) -> LossSum:
    """Return how many images have their class among the `k` highest scores, and their number.

    Args:
        scores: [b, classes].
        targets: [b, 2] int64, of which the first counts.
    """
    found = (classes_ahead(scores, targets[:, 0]) < k).to(torch.float32).sum()
    return LossSum(found, torch.full_like(found, len(targets)))


def classes_ahead(scores: Tensor, classes: Tensor) -> Tensor:
    """Return how many classes have a higher score than the given one of each image, [b] fp32.

    Of classes with equal scores those of lower numbers are ahead.

    Args:
        scores: [b, classes].
        classes: [b] int64.
    """
    given = classes.unsqueeze(1)
    score = scores.gather(1, given)
    before = torch.arange(scores.shape[1], device=scores.device) < given
    is_ahead = (scores > score) | ((scores == score) & before)
    return is_ahead.sum(dim=1).to(torch.float32)


class VitModel(nn.Module):
    """The whole of a ViT on one rank (of each tp group)."""

    def __init__(self, config: ModelConfig, build: ModelBuild, vision: VisionConfig) -> None:
        super().__init__()
        self.config, self.build, self.vision = config, build, vision
        self.specs: Sequence[LayerSpec] = vit_layers(config, build, vision=vision)
        assemble(self, self.specs)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores [b, classes] of images [b, c, height, width]."""
        return run_layers(self, self.specs, (images,))[0]
