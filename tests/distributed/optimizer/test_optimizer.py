"""Tests of optimizer steps, norms and skips over grids of ranks."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ShardingStrategy
from megatron.config.precision import PrecisionConfig
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import Partition, local_slice
from megatron.mpu.topology import Topology
from megatron.optimizer.clip_grads import parameters_norm
from megatron.optimizer.data_parallel import DistributedDataParallel
from megatron.optimizer.optimizer import OptimizerReport, build_optimizer
from megatron.optimizer.param_groups import UpdateRates
from tests.support.ranks import run_on_ranks

NO_SHARD, OPTIM = ShardingStrategy.NO_SHARD, ShardingStrategy.OPTIM

GRIDS = [(2, 1, 2), (1, 2, 2), (2, 2, 1), (4, 1, 1), (1, 1, 4)]
CONFIG = OptimizerConfig(clip_grad=0.5)
RATE, DECAY, MULTIPLIER = 1e-2, 0.1, 0.25
# float64: sums in another order, which is a few roundings of 1e-16
FP64_ROUNDING = 1e-13

# name: (whole shape, partition, stages of two that hold it); the embedding is tied
PARAMETERS: dict[str, tuple[tuple[int, ...], Partition | None, tuple[int, ...]]] = {
    "embedding.weight": ((16, 4), Partition(), (0, 1)),
    "layers.0.norm.weight": ((4,), None, (0,)),
    "layers.0.weight": ((8, 12), Partition(dim=1), (0,)),
    "layers.0.bias": ((8,), None, (0,)),
    "layers.1.weight": ((16, 4), Partition(blocks=2), (1,)),
    "layers.1.bias": ((16,), Partition(blocks=2), (1,)),
}


def whole(name: str, kind: str) -> Tensor:
    """The values or the gradient of a whole parameter; some gradients are zero."""
    seed = list(PARAMETERS).index(name) + (100 if kind == "gradient" else 0)
    shape = PARAMETERS[name][0]
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values * (values.abs() > 0.2) if kind == "gradient" else values


class Part(nn.Module):
    """This rank's slices of the parameters of its stage."""

    def __init__(self, ctx: ParallelContext, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.names = []
        for name, (_, partition, stages) in PARAMETERS.items():
            if ctx.pp.size > 1 and ctx.pp.rank not in stages:
                continue
            local = local_slice(whole(name, "values"), partition, ctx.tp.rank, ctx.tp.size)
            parameter = nn.Parameter(local.to(dtype).clone())
            parameter.split_by = partition  # type: ignore[attr-defined]
            self.names.append(name)
            self.register_parameter(name.replace(".", "/"), parameter)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name.replace("/", "."), value) for name, value in self.named_parameters()]

    def backward(self, ctx: ParallelContext) -> None:
        """Leave this data-parallel rank's share of the gradient; the shares add up to it."""
        shares = [rank + 1 for rank in range(ctx.dp.size)]
        share = shares[ctx.dp.rank] / sum(shares)
        for name, parameter in self.named():
            partition = PARAMETERS[name][1]
            gradient = local_slice(whole(name, "gradient"), partition, ctx.tp.rank, ctx.tp.size)
            (parameter * gradient.to(parameter.dtype) * share).sum().backward()


class Steps(NamedTuple):
    """What three steps did; `means` are what this rank has of AdamW's, from an element on."""

    reports: list[OptimizerReport]
    weights: dict[str, Tensor]
    means: dict[str, tuple[int, Tensor]]
    norm: float


def steps(ctx: ParallelContext, *, distributed: bool = False) -> Steps:
    part = Part(ctx)
    norm = parameters_norm(part.named(), ctx)
    ddp = DistributedDataParallel(
        part,
        ctx.replicas,
        sharding=OPTIM if distributed else NO_SHARD,
        bucket_elements=100,
    )
    precision = PrecisionConfig(fp64=True)
    optimizer = build_optimizer(
        part.named(), optimizer=CONFIG, precision=precision, ctx=ctx, replica=ddp
    )
    reports = []
    for _ in range(3):
        ddp.zero_grad()
        part.backward(ctx)
        ddp.finish()
        reports.append(
            optimizer.step(UpdateRates(RATE, DECAY), grad_multiplier=MULTIPLIER, with_zeros=True)
        )
    ddp.check_replicas_agree()
    weights = {name: parameter.detach() for name, parameter in part.named()}
    owned = optimizer.owned_ranges()
    assert (set(owned) == set(optimizer.named_state())) if distributed else not owned
    means = {
        name: (owned[name].start if distributed else 0, state["exp_avg"].flatten())
        for name, state in optimizer.named_state().items()
    }
    return Steps(reports, weights, means, norm)


def grids_equal_one_process() -> None:
    reference = steps(ParallelContext.single())
    for (tp, pp, dp), distributed in itertools.product(GRIDS, (False, True)):
        ctx = ParallelContext.build(Topology(tp=tp, pp=pp, dp=dp))
        reports, weights, means, norm = steps(ctx, distributed=distributed)
        assert norm == pytest.approx(reference.norm, rel=FP64_ROUNDING)
        for ours, wanted in zip(reports, reference.reports, strict=True):
            assert ours.grad_norm == pytest.approx(wanted.grad_norm, rel=FP64_ROUNDING)
            assert ours.num_zeros == wanted.num_zeros
        everyone: list[list[OptimizerReport]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, reports)
        assert all(other == reports for other in everyone)
        for name, value in weights.items():
            shape, partition, _ = PARAMETERS[name]
            expected = local_slice(reference.weights[name], partition, ctx.tp.rank, ctx.tp.size)
            torch.testing.assert_close(value, expected, rtol=FP64_ROUNDING, atol=FP64_ROUNDING)
            if name in means:
                start, mean = means[name]
                whole_mean = reference.means[name][1].view(shape)
                expected = local_slice(whole_mean, partition, ctx.tp.rank, ctx.tp.size)
                expected = expected.flatten()[start : start + mean.numel()]
                torch.testing.assert_close(mean, expected, rtol=FP64_ROUNDING, atol=FP64_ROUNDING)


def test_every_grid_takes_the_step_of_one_process_and_counts_everything_once() -> None:
    gradient = torch.cat([whole(name, "gradient").flatten() for name in PARAMETERS])
    first = steps(ParallelContext.single()).reports[0]
    assert first.grad_norm == pytest.approx(float(gradient.norm()) * MULTIPLIER, rel=FP64_ROUNDING)
    assert first.num_zeros == int((gradient == 0).sum())
    run_on_ranks(4, grids_equal_one_process)


def one_bad_rank(tp: int, pp: int, dp: int, bad_rank: int) -> list[float]:
    """Only one rank, and only its own copy, sees an infinity: not even its replicas do."""
    ctx = ParallelContext.build(Topology(tp=tp, pp=pp, dp=dp))
    part = Part(ctx, torch.float16)
    ddp = DistributedDataParallel(part, ctx.replicas)
    precision = PrecisionConfig(fp16=True, initial_loss_scale=8.0, hysteresis=1)
    optimizer = build_optimizer(part.named(), optimizer=CONFIG, precision=precision, ctx=ctx)
    scales = []
    for bad in (False, True, False):
        before = [parameter.clone() for parameter in part.parameters()]
        ddp.zero_grad()
        part.backward(ctx)
        ddp.finish()
        if bad and ctx.rank == bad_rank:
            # split over tp where tp > 1, so that this rank is one that counts it
            dict(part.named())["embedding.weight"].main_grad[0, 0] = math.inf
            for name in ("layers.0.weight", "layers.1.weight"):
                if name in part.names:
                    dict(part.named())[name].main_grad[0, 0] = math.nan
        report = optimizer.step(UpdateRates(RATE, DECAY))
        assert (report.applied, report.overflow) == (not bad, bad)
        assert math.isfinite(report.grad_norm) == (not bad)
        same = all(map(torch.equal, before, part.parameters()))
        assert same == bad
        scales.append(optimizer.loss_scale)
    return scales


@pytest.mark.parametrize(("grid", "bad_rank"), [((2, 1, 2), 3), ((1, 2, 2), 1), ((2, 2, 1), 2)])
def test_all_ranks_skip_together_when_one_overflows(
    grid: tuple[int, int, int], bad_rank: int
) -> None:
    assert run_on_ranks(4, one_bad_rank, *grid, bad_rank) == [[8.0, 4.0, 4.0]] * 4


def one_bad_replica(tp: int, dp: int, bad_rank: int) -> list[float]:
    """One rank's summand of a gradient is infinite; the sum is seen by one rank, its owner."""
    ctx = ParallelContext.build(Topology(tp=tp, dp=dp))
    part = Part(ctx, torch.float16)
    ddp = DistributedDataParallel(part, ctx.replicas, sharding=OPTIM, bucket_elements=1)
    precision = PrecisionConfig(fp16=True, initial_loss_scale=8.0, hysteresis=1)
    optimizer = build_optimizer(
        part.named(), optimizer=CONFIG, precision=precision, ctx=ctx, replica=ddp
    )
    scales = []
    for bad in (False, True, False):
        before = [parameter.clone() for parameter in part.parameters()]
        ddp.start_step(1)
        part.backward(ctx)
        if bad and ctx.rank == bad_rank:
            dict(part.named())["layers.0.bias"].main_grad[0] = math.inf
        ddp.finish()
        report = optimizer.step(UpdateRates(RATE, DECAY))
        assert (report.applied, report.overflow) == (not bad, bad)
        assert all(map(torch.equal, before, part.parameters())) == bad
        ddp.check_replicas_agree()
        scales.append(optimizer.loss_scale)
    return scales


@pytest.mark.parametrize(("tp", "dp", "bad_rank"), [(1, 4, 3), (2, 2, 2)])
def test_all_ranks_skip_together_when_a_shared_out_gradient_overflows(
    tp: int, dp: int, bad_rank: int
) -> None:
    assert run_on_ranks(4, one_bad_replica, tp, dp, bad_rank) == [[8.0, 4.0, 4.0]] * 4


def a_rank_without_work() -> list[int]:
    ctx = ParallelContext.build(Topology(dp=dist.get_world_size()))
    found = []
    for precision in (PrecisionConfig(), PrecisionConfig(bf16=True)):
        module = nn.Linear(2, 2).to(getattr(torch, precision.precision.value))
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
        ddp = DistributedDataParallel(module, ctx.replicas, sharding=OPTIM)
        optimizer = build_optimizer(ddp, optimizer=CONFIG, precision=precision, ctx=ctx)
        for _ in range(2):
            ddp.start_step(1)
            ddp(torch.ones(1, 2, dtype=module.weight.dtype)).square().sum().backward()
            ddp.finish()
            optimizer.step(UpdateRates(RATE, DECAY), with_zeros=True)
        ddp.check_replicas_agree()
        assert (module.weight < 1.0).all()
        state = optimizer.named_state()
        optimizer.load_state(state, optimizer.scalars())
        optimizer.refresh_masters()
        found.append(len(state))
    return found


def test_a_rank_that_owns_nothing_takes_part_all_the_same() -> None:
    assert run_on_ranks(3, a_rank_without_work) == [[1, 1], [1, 1], [0, 0]]


def masters_of_other_weights() -> bool:
    ctx = ParallelContext.build(Topology(dp=dist.get_world_size()))
    module = nn.Linear(4, 4).bfloat16()
    nn.init.ones_(module.weight)
    ddp = DistributedDataParallel(module, ctx.replicas, sharding=OPTIM)
    precision = PrecisionConfig(bf16=True)
    optimizer = build_optimizer(ddp, optimizer=CONFIG, precision=precision, ctx=ctx)
    twos = {
        name: {kind: torch.full_like(tensor, 2.0) for kind, tensor in tensors.items()}
        for name, tensors in optimizer.named_state().items()
    }
    optimizer.load_state(twos, optimizer.scalars())
    ddp.check_replicas_agree()
    return bool((module.weight == 2.0).all())


def test_all_ranks_have_the_weights_of_masters_that_are_loaded() -> None:
    assert run_on_ranks(2, masters_of_other_weights) == [True, True]
