"""ZeRO's flat shards as parts of named whole tensors, so that any layout can load them.

At stages 1 and 2 every rank has the weights of the model and a range of a flat fp32 copy of each
group of them; at stage 3 it has a range of every single weight, and the like of the flat copy. The
copy is a master in half precision, and merely a second copy in fp32. Keys are those of
`engine.state`, and what comes from here are views: reading into them restores the shards.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.checkpoint.sharded import ShardedTensor
from megatron.engine.deepspeed.interface import partitioned
from megatron.engine.state import parameter_tensors, placement_of
from megatron.mpu.context import ParallelContext
from megatron.optimizer.buckets import ElementRange


class _Span(NamedTuple):
    """Where a range of one parameter lies in a flat tensor."""

    name: str
    parameter: Parameter
    owned: ElementRange  # of the parameter, flattened
    at: int  # of its first element in the flat tensor


class FlatShard(NamedTuple):
    """One flat fp32 tensor that the update rule works on, and the parameter ranges it holds."""

    master: Tensor
    spans: tuple[_Span, ...]


class ZeroShards:
    """This rank's part of weights and optimizer state under stages 1 to 3.

    Args:
        optimizer: DeepSpeed's, around the update rule given to it.
        named: the parameters of this rank under their global names.
    """

    def __init__(
        self, optimizer: Any, named: Sequence[tuple[str, Parameter]], context: ParallelContext
    ) -> None:
        self._optimizer, self._named, self._context = optimizer, tuple(named), context
        self._names = {parameter: name for name, parameter in named}
        self.is_partitioned = hasattr(optimizer, "fp16_partitioned_groups")
        self.flats = tuple(self._find_flats())

    @property
    def has_masters(self) -> bool:
        """Whether the flat tensors are wider than the weights, and so hold more digits."""
        return any(parameter.dtype != torch.float32 for _, parameter in self._named)

    def weights(self) -> list[ShardedTensor]:
        """Return this rank's part of the model's weights."""
        if not self.is_partitioned:
            return parameter_tensors(self._named, self._context)
        return [
            ShardedTensor.of_range(
                f"model/{name}",
                values,
                start=owned.start,
                local_shape=tuple(partitioned(parameter).ds_shape),
                placement=placement_of(parameter, self._context),
            )
            for name, parameter, owned, values in self.partitions()
        ]

    def partitions(self) -> Iterator[tuple[str, Parameter, ElementRange, Tensor]]:
        """Yield the range of every parameter that this rank owns at stage 3, and its flat values.

        The values are flat.
        """
        for name, parameter in self._named:
            owned = partition_range(parameter)
            yield name, parameter, owned, _values(parameter, owned, is_partitioned=True)

    def sharded(self, key: str, span: _Span, flat: Tensor) -> ShardedTensor:
        """Return the span of `flat` (a master, or state of its shape) under `key`."""
        parameter = span.parameter
        shape = partitioned(parameter).ds_shape if self.is_partitioned else parameter.shape
        return ShardedTensor.of_range(
            key,
            flat.detach()[span.at : span.at + span.owned.size],
            start=span.owned.start,
            local_shape=tuple(shape),
            placement=placement_of(span.parameter, self._context),
        )

    @torch.no_grad()
    def refresh(self, *, masters: bool) -> None:
        """Take over weights that were filled in place; the flat copies as well if `masters`."""
        if self.is_partitioned:
            # Whole weights that are around are of before; the next use gathers them anew.
            self._optimizer.parameter_offload.partition_all_parameters()
        if not masters:
            return
        for flat in self.flats:
            for span in flat.spans:
                values = _values(span.parameter, span.owned, is_partitioned=self.is_partitioned)
                flat.master.detach()[span.at : span.at + span.owned.size].copy_(values)

    def _find_flats(self) -> Iterator[FlatShard]:
        if self.is_partitioned:
            yield from self._find_partitioned()
            return
        optimizer = self._optimizer
        is_bf16 = hasattr(optimizer, "bf16_groups")
        flats = (
            optimizer.fp32_groups_flat_partition
            if is_bf16
            else optimizer.single_partition_of_fp32_groups
        )
        orders = optimizer.bf16_groups if is_bf16 else optimizer.round_robin_bit16_groups
        for at, (flat, order) in enumerate(zip(flats, orders)):
            offsets = None if is_bf16 else optimizer.round_robin_bit16_offsets[at]
            rank = torch.distributed.get_rank(optimizer.real_dp_process_group[at])
            own_range = ElementRange(rank * flat.numel(), (rank + 1) * flat.numel())
            yield FlatShard(flat, tuple(self._spans(order, offsets, own_range)))

    def _spans(
        self, order: Sequence[Parameter], offsets: Sequence[int] | None, own_range: ElementRange
    ) -> Iterator[_Span]:
        """Yield the overlap of `own_range` with parameters at `offsets`, or end to end."""
        done = 0
        for at, parameter in enumerate(order):
            begin = done if offsets is None else offsets[at]
            done = begin + parameter.numel()
            start, stop = max(begin, own_range.start), min(done, own_range.stop)
            owned = (
                ElementRange(start - begin, stop - begin) if start < stop else ElementRange(0, 0)
            )
            yield _Span(
                self._names[parameter],
                parameter,
                owned,
                start - own_range.start if owned.size else 0,
            )

    def _find_partitioned(self) -> Iterator[FlatShard]:
        optimizer = self._optimizer
        for flat, group in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups):
            spans, at = [], 0
            for parameter in group:
                spans.append(
                    _Span(self._names[parameter], parameter, partition_range(parameter), at)
                )
                at += parameter.partition_numel()
            yield FlatShard(flat, tuple(spans))


def state_of_shards(shards: ZeroShards, rule: torch.optim.Optimizer) -> list[ShardedTensor]:
    """Return the update rule's state of every shard, with fp32 masters of narrower weights."""
    found = []
    for flat in shards.flats:
        kinds = {
            kind: tensor
            for kind, tensor in rule.state[flat.master].items()
            if kind != "step" and isinstance(tensor, Tensor)
        }
        for span in flat.spans:
            tensors = dict(kinds)
            if span.parameter.dtype != torch.float32:
                tensors["master"] = flat.master
            found += [
                shards.sharded(f"optimizer/{kind}/{span.name}", span, tensor)
                for kind, tensor in tensors.items()
            ]
    return found


def partition_range(parameter: Parameter) -> ElementRange:
    """Return the elements of a parameter of stage 3, flattened, whose values this rank keeps."""
    part = partitioned(parameter)
    length = part.partition_numel()
    start = min(part.ds_zero_partition_rank * length, part.ds_numel)
    return ElementRange(start, min(start + length, part.ds_numel))


def _values(parameter: Parameter, owned: ElementRange, *, is_partitioned: bool) -> Tensor:
    if is_partitioned:
        return partitioned(parameter).ds_tensor.detach()[: owned.size]
    return parameter.detach().reshape(-1)[owned.start : owned.stop]
