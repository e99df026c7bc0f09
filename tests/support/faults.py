"""Errors of the kinds that parallel training is prone to, to be put in for the length of a run.

Each stands at the level of torch.distributed, or of one function that is named here, so that it
stays what it is when code moves; where its place is gone, putting it in fails. What a reader would
get wrong: a collective that is "dropped" still happens, on a copy, so that all ranks go on.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import megatron.model.dropout
import megatron.model.mlp
import megatron.optimizer.optimizer
from megatron.config.run import RunConfig
from megatron.device import RoundTrip
from megatron.engine.base import StepPlan
from megatron.model.attention import SelfAttention
from megatron.model.experts import mixture as moe
from megatron.mpu import collectives
from megatron.mpu.context import Group, ReplicaGroups
from megatron.mpu.context_parallel import attention as over_ranks
from megatron.mpu.context_parallel.shares import SequenceShare
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.partition import partition_of
from megatron.mpu.random import Samples
from megatron.mpu.topology import Topology
from megatron.optimizer import replicated_grads
from megatron.optimizer.sharded_grads import ShardedGradBuffer
from megatron.optimizer.sharded_parameters import ShardedParameters
from megatron.pipeline.tied import TiedParameters
from tests.support.matrix import Case
from tests.support.tiny import Record, train

_FEW = 16  # elements: sums of losses, norms and signals are fewer, gradients and states are more


class Fault(NamedTuple):
    """What is done wrong, the composition (in its words) that shows it, and in what first."""

    case: str
    shows_in: str
    put_in: Callable[[Topology], AbstractContextManager[Any]]


def train_with_faults(runs: Sequence[tuple[str | None, RunConfig]]) -> list[Record]:
    """A body for `run_on_ranks`: runs with the fault that each names; without one for None."""
    records = []
    for name, config in runs:
        if name is None:
            records.append(train(config))
            continue
        grid = Case.of(FAULTS[name].case).grid
        ranks = Topology(tp=grid.tp, pp=grid.pp, dp=grid.dp, cp=grid.cp, ep=grid.ep, etp=grid.etp)
        with FAULTS[name].put_in(ranks):
            records.append(train(config))
    return records


def _sums(
    axis: str, wrong: Callable[..., Any], *, only: int | None = None, in_backward: bool = False
) -> Callable[[Topology], AbstractContextManager[None]]:
    """All-reduces of more than a few numbers over `axis` go wrong, or the one of a number only.

    Those of hidden states in backward are started, and waited for later; others are not.
    """

    @contextmanager
    def put_in(grid: Topology) -> Iterator[None]:
        real, count, peers = dist.all_reduce, 0, set(grid.peers(dist.get_rank(), axis))

        def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            is_over_axis = set(dist.get_process_group_ranks(kwargs["group"])) == peers
            is_large = tensor.numel() > _FEW
            if is_over_axis and is_large and (not in_backward or kwargs.get("async_op")):
                count += 1
                if only in (None, count):
                    return wrong(real, tensor, *args, **kwargs)
            return real(tensor, *args, **kwargs)

        with patch.object(dist, "all_reduce", all_reduce):
            yield
        assert count >= (only or 1), f"there were {count} sums over {axis}"

    return put_in


def _dropped(real: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    return real(tensor.clone(), *args, **kwargs)


def _doubled(real: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    real(tensor, *args, **{**kwargs, "async_op": False})
    return real(tensor, *args, **kwargs)


def _averaged(real: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    tensor.div_(dist.get_world_size(kwargs["group"]))
    return real(tensor, *args, **kwargs)


@contextmanager
def _reduce_scatters_dropped(grid: Topology) -> Iterator[None]:
    real, count = collectives._REDUCE_SCATTER, 0

    def reduce_scatter(out: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        own = tensor.chunk(dist.get_world_size(kwargs["group"]))[dist.get_rank(kwargs["group"])]
        done = real(torch.empty_like(out), tensor, *args, **kwargs)
        out.copy_(own)
        return done

    with patch.object(collectives, "_REDUCE_SCATTER", reduce_scatter):
        yield
    assert count


@contextmanager
def _gathers_dropped(grid: Topology) -> Iterator[None]:
    real, count = collectives._ALL_GATHER, 0

    def all_gather(whole: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return real(torch.empty_like(whole), tensor, *args, **kwargs)

    with patch.object(collectives, "_ALL_GATHER", all_gather):
        yield
    assert count


@contextmanager
def _tied_sums(grid: Topology, *, times: int) -> Iterator[None]:
    real = TiedParameters.sum_gradients

    def sum_gradients(self: TiedParameters) -> None:
        for _ in range(times):
            real(self)

    with patch.object(TiedParameters, "sum_gradients", sum_gradients):
        yield


@contextmanager
def _replicated_sums(grid: Topology, *, times: int) -> Iterator[None]:
    """The sum over tp of gradients of what is replicated under sequence parallelism."""
    real: Any = replicated_grads.all_reduce  # type: ignore[attr-defined]

    def all_reduce(tensor: Tensor, group: Any) -> Tensor:
        for _ in range(times):
            tensor = real(tensor, group)
        return tensor

    with patch.object(replicated_grads, "all_reduce", all_reduce):
        yield


@contextmanager
def _everything_counted(grid: Topology) -> Iterator[None]:
    """The norm takes what several ranks hold whole to be parts of something larger."""

    def owned_by_this_rank(named: Sequence[Any], ctx: Any) -> list[bool]:
        return [True for _ in named]

    with patch.object(megatron.optimizer.optimizer, "owned_by_this_rank", owned_by_this_rank):
        yield


@contextmanager
def _glu_halves_swapped(grid: Topology) -> Iterator[None]:
    """The last tp rank takes gate for up, and up for gate."""

    class Swapped(ColumnParallelLinear):
        def forward(self, hidden: Tensor) -> Tensor:
            output: Tensor = super().forward(hidden)
            split = partition_of(self.weight)
            if split is not None and split.blocks == 2 and self._tp.is_last:
                output = torch.cat(output.chunk(2, dim=-1)[::-1], dim=-1)
            return output

    with patch.object(megatron.model.mlp, "ColumnParallelLinear", Swapped):
        yield


@contextmanager
def _glu_cut_as_one_matrix(grid: Topology) -> Iterator[None]:
    """[gate; up] is shared out from top to bottom: the first rank has gates only."""

    class AsOne(ColumnParallelLinear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "blocks": 1})

    with patch.object(megatron.model.mlp, "ColumnParallelLinear", AsOne):
        yield


@contextmanager
def _second_gradient_lost(grid: Topology) -> Iterator[None]:
    """What the last stage sends back for its second micro-batch is zeros."""
    real, count = dist.batch_isend_irecv, 0

    def batch(operations: list[dist.P2POp]) -> list[dist.Work]:
        nonlocal count
        for operation in operations:
            back = operation.op is dist.isend and operation.peer < dist.get_rank()
            if back and operation.tensor.is_floating_point():
                count += 1
                if count == 2:
                    operation.tensor = torch.zeros_like(operation.tensor)
        return real(operations)

    with patch.object(dist, "batch_isend_irecv", batch):
        yield
    assert count or dist.get_rank() == 0


@contextmanager
def _chunks_out_of_order(grid: Topology) -> Iterator[None]:
    """A rank holds its late chunk before its early one."""
    real = SequenceShare.slices

    def slices(self: SequenceShare, length: int) -> tuple[slice, ...]:
        return real(self, length)[::-1]

    with patch.object(SequenceShare, "slices", slices):
        yield


@contextmanager
def _positions_within_the_share(grid: Topology) -> Iterator[None]:
    """A rank counts positions from its own first token."""
    real = SequenceShare.positions

    def positions(self: SequenceShare, length: int, *args: Any) -> Tensor:
        return torch.arange(len(real(self, length, *args)))

    with patch.object(SequenceShare, "positions", positions):
        yield


@contextmanager
def _sums_of_the_first_block(grid: Topology) -> Iterator[None]:
    """Backward takes the log-sum-exp of a rank's own keys for that of all."""
    real: Any = over_ranks.merge_  # type: ignore[attr-defined]

    def merge_(out: Tensor, log_sums: Tensor, *part: Tensor) -> None:
        real(out, log_sums.clone(), *part)

    with patch.object(over_ranks, "merge_", merge_):
        yield


@contextmanager
def _key_gradients_one_step_short(grid: Topology) -> Iterator[None]:
    """A rank keeps the gradients of the keys that it saw last, which are another's."""

    def own(self: Any) -> Tensor:
        self._coming.wait()
        sent: Tensor = self._coming.sent
        return sent

    with patch.object(over_ranks._KeyGradients, "own", own):
        yield


@contextmanager
def _experts_summed_over_all(grid: Topology) -> Iterator[None]:
    """Gradients of experts are summed over the replicas of all else, which hold other experts."""
    with patch.object(ReplicaGroups, "of", lambda self, parameter: self.dense):
        yield


@contextmanager
def _rows_as_they_arrived(grid: Topology) -> Iterator[None]:
    """A rank computes with the rows of the first source, and then with those of the next."""
    real: Any = moe.dispatch_plan

    def dispatch_plan(*args: Any) -> Any:
        plan = real(*args)
        arrived = torch.arange(len(plan.order))
        return plan._replace(order=arrived, back=arrived)

    with patch.object(moe, "dispatch_plan", dispatch_plan):
        yield


@contextmanager
def _rows_go_to_one_part(grid: Topology) -> Iterator[None]:
    """Every copy of a row goes to the first part of its expert."""
    real: Any = moe.parts_of_experts

    def parts_of_experts(chosen: Tensor, experts: int, *, ep: int, etp: int) -> Tensor:
        parts: Tensor = real(chosen, experts, ep=ep, etp=etp).view(*chosen.shape, etp)
        return parts[..., :1].expand_as(parts).flatten(-2)

    with patch.object(moe, "parts_of_experts", parts_of_experts):
        yield


@contextmanager
def _last_micro_batch_kept(grid: Topology) -> Iterator[None]:
    """A share of a micro-batch takes the place of the sum over those before."""
    real = ShardedGradBuffer._complete

    def complete(self: ShardedGradBuffer) -> None:
        self._kept.clear()
        real(self)

    with patch.object(ShardedGradBuffer, "_complete", complete):
        yield


@contextmanager
def _stale_parameters(grid: Topology) -> Iterator[None]:
    """What was gathered before an update is used after it."""
    with (
        patch.object(ShardedParameters, "after_gradients", lambda self, parameters: None),
        patch.object(ShardedParameters, "gather", lambda self: None),
    ):
        yield


@contextmanager
def _state_stays_as_it_came(grid: Topology) -> Iterator[None]:
    """New state of the optimizer does not go back to host memory."""
    with patch.object(RoundTrip, "back", lambda self: None):
        yield


@contextmanager
def _same_masks_on_replicas(grid: Topology) -> Iterator[None]:
    """Every replica drops what the first one drops."""
    real = StepPlan.samples

    def samples(self: StepPlan, microbatch: int, replicas: Group) -> Samples:
        return real(self, microbatch, dataclasses.replace(replicas, rank=0))

    with patch.object(StepPlan, "samples", samples):
        yield


@contextmanager
def _masks_of_the_first_part(grid: Topology) -> Iterator[None]:
    """Every tp rank drops in its part of a sequence what the first one drops in its own."""
    with patch.object(
        megatron.model.dropout, "sequence_part", lambda length, tp: slice(0, length // tp.size)
    ):
        yield


@contextmanager
def _same_masks_for_all_heads(grid: Topology) -> Iterator[None]:
    """Every tp rank drops scores of its heads as the first one does of its own."""
    with patch.object(SelfAttention, "_own_heads", lambda self, count: range(count)):
        yield


_FIRST_LOSS, _FIRST_NORM, _SECOND_LOSS = (
    "loss of step 0",
    "gradient norm of step 0",
    "loss of step 1",
)
FAULTS: Mapping[str, Fault] = {
    "a sum of hidden states over tp is dropped": Fault(
        "tp2 gqa swiglu", _FIRST_LOSS, _sums("tp", _dropped, only=4)
    ),
    "a sum of hidden states over tp is taken twice": Fault(
        "tp2 gqa swiglu", _FIRST_LOSS, _sums("tp", _doubled, only=4)
    ),
    "a sum of gradients inside the model over tp is dropped": Fault(
        "tp2 gqa swiglu", _FIRST_NORM, _sums("tp", _dropped, only=4, in_backward=True)
    ),
    "the gradients' sum over dp is dropped": Fault("dp2", _FIRST_NORM, _sums("dp", _dropped)),
    "the gradients' sum over dp is taken twice": Fault("dp2", _FIRST_NORM, _sums("dp", _doubled)),
    "the gradients are averaged over dp": Fault("dp2", _FIRST_NORM, _sums("dp", _averaged)),
    "the gradients' sum over cp is dropped": Fault("cp2 p2p", _FIRST_NORM, _sums("cp", _dropped)),
    "the gradients are averaged over cp": Fault("cp2 p2p", _FIRST_NORM, _sums("cp", _averaged)),
    "a rank holds its chunks out of order": Fault("cp2 p2p", _FIRST_LOSS, _chunks_out_of_order),
    "a rank counts positions from its own first token": Fault(
        "cp2 a2a rotary", _FIRST_LOSS, _positions_within_the_share
    ),
    "backward uses the log-sum-exp of one block": Fault(
        "cp2 all_gather", _FIRST_NORM, _sums_of_the_first_block
    ),
    "gradients of keys are one step short of home": Fault(
        "cp2 p2p", _FIRST_NORM, _key_gradients_one_step_short
    ),
    "gradients of experts are summed over all replicas": Fault(
        "dp2 ep2 experts", _FIRST_NORM, _experts_summed_over_all
    ),
    "rows are computed in the order in which they arrived": Fault(
        "dp2 ep2 experts", _FIRST_LOSS, _rows_as_they_arrived
    ),
    "rows go to one part of their expert": Fault(
        "dp2 experts halves", _FIRST_LOSS, _rows_go_to_one_part
    ),
    "the gradients of a micro-batch take the place of those before": Fault(
        "dp2 sharded-gradients", _FIRST_NORM, _last_micro_batch_kept
    ),
    "parameters that were gathered before an update are used after it": Fault(
        "dp2 fully-sharded", _SECOND_LOSS, _stale_parameters
    ),
    "a replica that shares gradients out keeps its own": Fault(
        "dp2 sharded-gradients", _FIRST_NORM, _reduce_scatters_dropped
    ),
    "one bucket's sum over dp is dropped, under tp, pp and dp": Fault(
        "tp2 sp pp2 1f1b dp2 overlapped", _FIRST_NORM, _sums("dp", _dropped, only=2)
    ),
    "a replica updates its share by its own gradients": Fault(
        "dp2 distributed", _FIRST_NORM, _reduce_scatters_dropped
    ),
    "updated parameters are not gathered": Fault("dp2 distributed", _SECOND_LOSS, _gathers_dropped),
    "the tied embedding's sum over stages is dropped": Fault(
        "pp2 1f1b", _FIRST_NORM, partial(_tied_sums, times=0)
    ),
    "the tied embedding's sum over stages is taken twice": Fault(
        "pp2 1f1b", _FIRST_NORM, partial(_tied_sums, times=2)
    ),
    "the tied embedding's sum over stages is dropped, where everything is composed": Fault(
        "tp2 pp2 zero-bubble dp2 gather-overlapped overlapped",
        _FIRST_NORM,
        partial(_tied_sums, times=0),
    ),
    "the gradient norm counts on every tp rank what all of them hold": Fault(
        "tp2 gqa swiglu", _FIRST_NORM, _everything_counted
    ),
    "the norms' partial gradients are not summed under sp": Fault(
        "tp2 sp", _FIRST_NORM, partial(_replicated_sums, times=0)
    ),
    "the norms' partial gradients are summed twice under sp": Fault(
        "tp2 sp", _FIRST_NORM, partial(_replicated_sums, times=2)
    ),
    "one rank swaps the halves of the GLU": Fault(
        "tp2 gqa swiglu", _FIRST_LOSS, _glu_halves_swapped
    ),
    "the GLU is cut as one matrix": Fault("tp2 gqa swiglu", _FIRST_LOSS, _glu_cut_as_one_matrix),
    "new state stays on the device": Fault(
        "dp2 on-host", "loss of step 2", _state_stays_as_it_came
    ),
    "replicas drop alike": Fault("dp2 dropout", _FIRST_LOSS, _same_masks_on_replicas),
    "the parts of a sequence are dropped alike": Fault(
        "tp2 sp dropout", _FIRST_LOSS, _masks_of_the_first_part
    ),
    "the heads of ranks are dropped alike": Fault(
        "tp2 gqa swiglu dropout", _FIRST_LOSS, _same_masks_for_all_heads
    ),
    "the gradient of a micro-batch is lost between stages": Fault(
        "pp2 1f1b", _FIRST_NORM, _second_gradient_lost
    ),
}
