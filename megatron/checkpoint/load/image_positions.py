"""Positions of a ViT for images of another size than it was trained on.

The rows of patches are a grid, which is scaled as an image is, by bicubic interpolation; the class
token's row is kept (Dosovitskiy et al. 2020, arXiv 2010.11929, section 3.2). What a reader would
get wrong: only weights to begin with are treated so. The state of an optimizer is not, so a run
goes on with images of the size that it began with.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import log
from megatron.checkpoint.boxes import whole
from megatron.checkpoint.gpt_tensors import POSITION_TABLE
from megatron.checkpoint.load.opened import OpenedCheckpoint
from megatron.checkpoint.sharded import ShardedTensor, ShardPart
from megatron.config.fields import from_plain
from megatron.config.models.vision import VisionConfig

_NAME = f"model/{POSITION_TABLE}"


def interpolated(table: Tensor, saved: VisionConfig, wanted: VisionConfig) -> Tensor:
    """Return the table [tokens, h] of `saved` images as one for `wanted` ones, in its dtype."""
    first, patches = torch.split(table, [len(table) - saved.num_patches, saved.num_patches])
    grid = patches.float().view(1, *saved.patch_grid, -1).permute(0, 3, 1, 2)
    scaled = F.interpolate(grid, size=wanted.patch_grid, mode="bicubic", align_corners=False)
    return torch.cat([first, scaled.flatten(2).squeeze(0).t().to(table.dtype)])


def with_saved_positions(
    opened: OpenedCheckpoint, tensors: Sequence[ShardedTensor], wanted: VisionConfig
) -> tuple[list[ShardedTensor], Callable[[], None]]:
    """Return what is to be read where images had another size, and what to call when it is.

    The table of positions is then read in the shape that was saved, and the function fills the
    run's with its values, interpolated. Where the tables fit, nothing changes.
    """
    saved = from_plain(VisionConfig, dict(opened.manifest.config.get("vision", {})))
    found = opened.manifest.tensors.get(_NAME)
    other_size = saved.patch_grid != wanted.patch_grid
    if found is None or not other_size or saved.has_class_token != wanted.has_class_token:
        return list(tensors), lambda: None
    log.info(
        f"positions of {_shown(saved)} patches are interpolated to those of {_shown(wanted)}, "
        "because images had another size"
    )
    targets, tables = [], []
    for tensor in tensors:
        if tensor.name != _NAME:
            targets.append(tensor)
            continue
        table = torch.empty(found.global_shape, dtype=tensor.dtype)
        part = ShardPart(whole(found.global_shape), table)
        targets.append(ShardedTensor(_NAME, found.global_shape, tensor.dtype, (part,)))
        tables.append((tensor, table))

    def fill() -> None:
        for tensor, table in tables:
            values = interpolated(table, saved, wanted)
            for part in tensor.parts:
                part.view.copy_(values[part.box.slices])

    return targets, fill


def _shown(vision: VisionConfig) -> str:
    return " x ".join(map(str, vision.patch_grid))
