"""How a parameter is split over a grid axis, and where its values come from: arithmetic only.

Both are attributes of a parameter, `split_by` (absent: every rank holds the whole) and `init`; a
third, `sequence_parallel`, marks a gradient that is a part of a sum; `sharding_unit` names the
parameters that replicas share out together. Initialisation, clipping, the optimizer and checkpoints
read them here and depend on nothing else of parallel layers.
`copy.deepcopy` of a parameter loses all of them: build models anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Partition:
    """A tensor is cut along `dim` into equal parts, one per index of grid axis `axis`: tp or ep.

    With `blocks` > 1 the dimension is that many blocks one after the other, each of which is cut
    evenly: a gated MLP's [gate; up] has two, and rank i holds part i of both, concatenated.
    """

    axis: str = "tp"
    dim: int = 0
    blocks: int = 1


class InitKind(StrEnum):
    """The distribution of initial values."""

    NORMAL = "normal"
    ZEROS = "zeros"
    ONES = "ones"
    XAVIER_UNIFORM = "xavier_uniform"


@dataclass(frozen=True, slots=True)
class Init:
    """The values a parameter starts from, as a rule about the whole parameter.

    `std` belongs to `NORMAL`. `XAVIER_UNIFORM` takes its bounds from the whole shape. Rows beyond
    `true_rows` are padding and start as zeros (None: no padding).
    """

    kind: InitKind
    std: float = 0.0
    true_rows: int | None = None


class ShardBox(NamedTuple):
    """A box of the local tensor and the box of the whole tensor that holds the same values."""

    local: tuple[slice, ...]
    global_: tuple[slice, ...]


def set_parameter_metadata(
    parameter: Tensor,
    *,
    init: Init,
    partition: Partition | None = None,
    sequence_parallel: bool = False,
) -> None:
    """Set on `parameter` its partition (None: replicated) and its initial values.

    Args:
        sequence_parallel: every tp rank holds the whole of it but applies it to its own part of
            the sequence (or, of norms of heads, to its own heads), so the gradients have to be
            summed over tp before anything else is done with them (`reduce_first`).
    """
    # Not `partition`, which DeepSpeed's ZeRO stage 3 makes a method of every parameter.
    vars(parameter).update(init=init, split_by=partition, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        vars(parameter)["reduce_first"] = True


def partition_of(parameter: Tensor) -> Partition | None:
    """Return how `parameter` is split; None when it is replicated."""
    partition: Partition | None = getattr(parameter, "split_by", None)
    return partition


def is_split_over(parameter: Tensor, axis: str) -> bool:
    """Return whether each rank along `axis` has its own part of `parameter`."""
    partition = partition_of(parameter)
    return partition is not None and partition.axis == axis


def init_of(parameter: Tensor) -> Init | None:
    """Return the values `parameter` starts from; None when it was not set."""
    init: Init | None = getattr(parameter, "init", None)
    return init


def set_sharding_unit(parameter: Tensor, name: str) -> None:
    """Make `parameter` one of the unit `name`: they are gathered and given back together.

    A unit is used by a layer, or by several where it is tied, and by nothing else.
    """
    vars(parameter)["sharding_unit"] = name


def sharding_unit(parameter: Tensor) -> str | None:
    """Return the unit of `parameter`; None: the one of all that have no other."""
    unit: str | None = getattr(parameter, "sharding_unit", None)
    return unit


def is_sequence_parallel(parameter: Tensor) -> bool:
    """Return whether the gradients of `parameter` on the tp ranks have to be summed."""
    return bool(getattr(parameter, "sequence_parallel", False))


def global_shape(
    local_shape: Sequence[int], partition: Partition | None, size: int
) -> tuple[int, ...]:
    """Return the shape of the whole tensor of which `size` ranks hold parts of `local_shape`."""
    shape = list(local_shape)
    if partition is not None:
        shape[partition.dim] *= size
    return tuple(shape)


def local_shape(
    global_shape: Sequence[int], partition: Partition | None, size: int
) -> tuple[int, ...]:
    """Return the shape of one of `size` equal parts; ConfigError when they would not be equal."""
    shape = list(global_shape)
    if partition is not None:
        shape[partition.dim] = partition.blocks * _part_length(shape, partition, size)
    return tuple(shape)


def pieces(
    global_shape: Sequence[int], partition: Partition | None, index: int, size: int
) -> tuple[ShardBox, ...]:
    """Return the boxes of part `index` of `size`: one per block, or the whole if replicated.

    Over all indexes the global boxes hold every element exactly once, and for each index the
    local boxes tile the local tensor.

    Raises:
        ConfigError: the dimension does not divide into `blocks * size` equal lengths.
    """
    whole = tuple(slice(0, length) for length in global_shape)
    if partition is None:
        return (ShardBox(whole, whole),)
    part = _part_length(global_shape, partition, size)
    dim = partition.dim % len(whole)

    def box(start: int) -> tuple[slice, ...]:
        return (*whole[:dim], slice(start, start + part), *whole[dim + 1 :])

    return tuple(
        ShardBox(local=box(block * part), global_=box((block * size + index) * part))
        for block in range(partition.blocks)
    )


def local_slice(full_tensor: Tensor, partition: Partition | None, index: int, size: int) -> Tensor:
    """Return part `index` of `size` of a whole tensor: a view of one box, else a copy."""
    boxes = pieces(full_tensor.shape, partition, index, size)
    if partition is None or len(boxes) == 1:
        return full_tensor[boxes[0].global_]
    return torch.cat([full_tensor[box.global_] for box in boxes], dim=partition.dim)


def join_slices(locals_: Sequence[Tensor], partition: Partition | None) -> Tensor:
    """Return the whole tensor with the parts `locals_` in index order; undoes `local_slice`."""
    size = len(locals_)
    full = locals_[0].new_empty(global_shape(locals_[0].shape, partition, size))
    for index, local in enumerate(locals_):
        for piece in pieces(full.shape, partition, index, size):
            full[piece.global_] = local[piece.local]
    return full


def _part_length(shape: Sequence[int], partition: Partition, size: int) -> int:
    length = shape[partition.dim]
    if length % (partition.blocks * size):
        raise ConfigError(
            "a dimension does not divide evenly over the ranks that share it",
            found=f"shape {tuple(shape)}, dimension {partition.dim} in {partition.blocks} "
            f"block(s) over {size} {partition.axis} ranks",
            fix=f"make the dimension a multiple of {partition.blocks * size}, "
            f"or use fewer {partition.axis} ranks",
        )
    return length // (partition.blocks * size)
