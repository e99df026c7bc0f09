"""Runs the layers of a stage so that as little is saved for backward as the run asks for.

Which layers are recomputed, in which groups, is arithmetic on one virtual stage (`plan_groups`);
how a group is recomputed bit for bit is `mpu/recompute.py`. Parts of a layer (selective
recomputation) are the layer's own affair.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.config.activations import ActivationPolicy, RecomputeMethod
from megatron.mpu.context import Group
from megatron.mpu.offload import Offload
from megatron.mpu.random import RandomStreams
from megatron.mpu.recompute import recompute, split_over

Tensors = tuple[Tensor, ...]


class LayerGroup(NamedTuple):
    """The layers [start, stop) of a virtual stage, and the policy for their activations."""

    start: int
    stop: int
    recomputed: bool = False  # all of them as one
    offloaded: bool = False


def plan_groups(is_block: Sequence[bool], policy: ActivationPolicy) -> tuple[LayerGroup, ...]:
    """Cut one virtual stage into groups, in order and without gaps.

    Only transformer layers are recomputed or offloaded, and only those are counted: uniform makes
    groups of `num_layers` of them, the last of which may be shorter; block recomputes the first
    `num_layers`, each by itself. A group is offloaded if its first layer is.

    Args:
        is_block: for every layer of the stage whether it is a transformer layer.
    """
    groups: list[LayerGroup] = []
    blocks = at = 0
    while at < len(is_block):
        size, recomputed = 1, False
        if is_block[at] and policy.method is RecomputeMethod.BLOCK:
            recomputed = blocks < policy.num_layers
        elif is_block[at] and policy.method is RecomputeMethod.UNIFORM:
            recomputed = True
            ahead = [*is_block[at : at + policy.num_layers], False]
            size = ahead.index(False)
        offloaded = is_block[at] and blocks < policy.offload_layers
        groups.append(LayerGroup(at, at + size, recomputed, offloaded))
        blocks += size if is_block[at] else 0
        at += size
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """The policy of a run for saved activations, with the state to carry it out."""

    policy: ActivationPolicy
    streams: RandomStreams
    tp: Group

    def run(
        self,
        run: Callable[[int, int, Tensors], Tensors],
        carry: Tensors,
        *,
        is_block: Sequence[bool],
        weights: Iterable[Tensor],
    ) -> Tensors:
        """Run `carry` through a virtual stage; `run(i, j, carry)` runs its layers [i, j).

        Args:
            is_block: for every layer of the stage whether it is a transformer layer.
            weights: what is never offloaded.
        """
        if not torch.is_grad_enabled():
            return run(0, len(is_block), carry)
        plan = plan_groups(is_block, self.policy)
        for offloaded, groups in groupby(plan, key=lambda group: group.offloaded):
            # One for all of them: what several layers share (a mask) is copied once.
            offload = Offload(weights) if offloaded else None
            with offload or nullcontext():
                for group in groups:
                    carry = self._run_group(group, run, carry, offload)
        return carry

    def _run_group(
        self,
        group: LayerGroup,
        run: Callable[[int, int, Tensors], Tensors],
        carry: Tensors,
        offload: Offload | None,
    ) -> Tensors:
        whole = partial(run, group.start, group.stop)
        if not group.recomputed:
            return whole(carry)
        floating = [tensor.is_floating_point() for tensor in carry]

        def again(*inputs: Tensor) -> Tensors:
            # Ids are not inputs: they are the very same tensors again, by which a geometry that
            # was made for them is recognised.
            given: Iterator[Tensor] = iter(inputs)
            return whole(tuple(next(given) if f else t for t, f in zip(carry, floating)))

        inputs = [tensor for tensor, f in zip(carry, floating) if f]
        split: AbstractContextManager[None] = (
            split_over(self.tp, offload=offload) if self.policy.distribute else nullcontext()
        )
        with split:
            return recompute(again, self.streams, *inputs)
