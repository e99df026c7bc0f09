"""How a parameter is split over a grid axis, and where its values come from: arithmetic only.

Both are attributes of a parameter, `split_by` (absent: every rank holds the whole) and `init`; a
third, `sequence_parallel`, marks a gradient that is a part of a sum; `sharding_unit` names the
parameters that replicas share out together, and `row_runs` says that a parameter is several
matrices. Initialisation, clipping, the optimizer and checkpoints
read them here and depend on nothing else of parallel layers.
`copy.deepcopy` of a parameter loses all of them: build models anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.errors import ConfigError

EXPERTS = "etp_ep"  # the axis of experts that are shared out; see `Topology.expert_groups`


class Within(NamedTuple):
    """Each part of a partition is cut again: along `dim`, of `blocks`, into `size` parts."""

    dim: int
    size: int
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class Partition:
    """A tensor is cut along `dim` into equal parts, one per index of the grid axis `axis`.

    With `blocks` > 1 the dimension is that many blocks one after the other, each of which is cut
    evenly: a gated MLP's [gate; up] has two, and rank i holds part i of both, concatenated.

    With `within` each part, of one block, is cut again along another dimension, and neighbours on
    the axis hold the parts of that: experts over ep, and the matrices of each over etp.
    """

    axis: str = "tp"
    dim: int = 0
    blocks: int = 1
    within: Within | None = None

    def cuts(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield the dimensions that are cut for `size` ranks: their blocks, and parts of each."""
        inner = 1 if self.within is None else self.within.size
        yield self.dim, self.blocks, size // inner
        if self.within is not None:
            yield self.within.dim, self.within.blocks, inner


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


def is_shared_out(parameter: Tensor) -> bool:
    """Return whether `parameter` is of experts to which tokens go."""
    return is_split_over(parameter, EXPERTS)


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


def set_row_runs(parameter: Tensor, runs: tuple[int, ...]) -> None:
    """Say that `parameter` is as many matrices as `runs` has numbers.

    Its rows are so many of the first, then of the second, and so on, over and over: those of
    queries, keys and values of each query group.
    """
    vars(parameter)["row_runs"] = runs


def row_runs(parameter: Tensor) -> tuple[int, ...] | None:
    """Return the runs of rows of several matrices in `parameter`; None: it is one matrix."""
    runs: tuple[int, ...] | None = getattr(parameter, "row_runs", None)
    return runs


def is_sequence_parallel(parameter: Tensor) -> bool:
    """Return whether the gradients of `parameter` on the tp ranks have to be summed."""
    return bool(getattr(parameter, "sequence_parallel", False))


def global_shape(
    local_shape: Sequence[int], partition: Partition | None, size: int
) -> tuple[int, ...]:
    """Return the shape of the whole tensor of which `size` ranks hold parts of `local_shape`."""
    shape = list(local_shape)
    if partition is not None:
        for dim, _, parts in partition.cuts(size):
            shape[dim] *= parts
    return tuple(shape)


def local_shape(
    global_shape: Sequence[int], partition: Partition | None, size: int
) -> tuple[int, ...]:
    """Return the shape of one of `size` equal parts; ConfigError when they would not be equal."""
    shape = list(global_shape)
    if partition is not None:
        for dim, blocks, parts in partition.cuts(size):
            shape[dim] = blocks * _part_length(global_shape, partition, (dim, blocks, parts))
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
    local, global_ = list(whole), list(whole)
    *outer, (dim, blocks, parts) = partition.cuts(size)
    for outer_dim, _, outer_parts in outer:  # of one block each, before the last cut
        length = _part_length(global_shape, partition, (outer_dim, 1, outer_parts))
        start = index // parts * length
        local[outer_dim], global_[outer_dim] = slice(0, length), slice(start, start + length)
    part = _part_length(global_shape, partition, (dim, blocks, parts))

    def box(slices: Sequence[slice], start: int) -> tuple[slice, ...]:
        at = dim % len(slices)
        return (*slices[:at], slice(start, start + part), *slices[at + 1 :])

    return tuple(
        ShardBox(
            local=box(local, block * part),
            global_=box(global_, (block * parts + index % parts) * part),
        )
        for block in range(blocks)
    )


def local_slice(full_tensor: Tensor, partition: Partition | None, index: int, size: int) -> Tensor:
    """Return part `index` of `size` of a whole tensor: a view of one box, else a copy."""
    boxes = pieces(full_tensor.shape, partition, index, size)
    if partition is None or len(boxes) == 1:
        return full_tensor[boxes[0].global_]
    *_, (dim, _, _) = partition.cuts(size)
    return torch.cat([full_tensor[box.global_] for box in boxes], dim=dim)


def join_slices(locals_: Sequence[Tensor], partition: Partition | None) -> Tensor:
    """Return the whole tensor with the parts `locals_` in index order; undoes `local_slice`."""
    size = len(locals_)
    full = locals_[0].new_empty(global_shape(locals_[0].shape, partition, size))
    for index, local in enumerate(locals_):
        for piece in pieces(full.shape, partition, index, size):
            full[piece.global_] = local[piece.local]
    return full


def _part_length(shape: Sequence[int], partition: Partition, cut: tuple[int, int, int]) -> int:
    dim, blocks, parts = cut
    length = shape[dim]
    if length % (blocks * parts):
        raise ConfigError(
            "a dimension does not divide evenly over the ranks that share it",
            found=f"shape {tuple(shape)}, dimension {dim} in {blocks} "
            f"block(s) over {parts} {partition.axis} ranks",
            fix=f"make the dimension a multiple of {blocks * parts}, "
            f"or use fewer {partition.axis} ranks",
        )
    return length // (blocks * parts)
