"""Tests of optimizer steps, norms and skips over grids of ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import Partition, local_slice
from megatron.mpu.topology import Topology
from megatron.optimizer.clip_grads import parameters_norm
from megatron.optimizer.data_parallel import DistributedDataParallel
from megatron.optimizer.optimizer import OptimizerReport, build_optimizer
from tests.support.ranks import run_on_ranks

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
            parameter.partition = partition  # type: ignore[attr-defined]
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


def steps(
    ctx: ParallelContext,
) -> tuple[list[OptimizerReport], dict[str, Tensor], dict[str, Tensor], float]:
    part = Part(ctx)
    norm = parameters_norm(part.named(), ctx)
    ddp = DistributedDataParallel(part, ctx.dp)
    precision = PrecisionConfig(fp64=True)
    optimizer = build_optimizer(part.named(), optimizer=CONFIG, precision=precision, ctx=ctx)
    reports = []
    for _ in range(3):
        ddp.zero_grad()
        part.backward(ctx)
        ddp.all_reduce()
        reports.append(
            optimizer.step(
                learning_rate=RATE,
                weight_decay=DECAY,
                grad_multiplier=MULTIPLIER,
                with_zeros=True,
            )
        )
    ddp.check_replicas_agree()
    weights = {name: parameter.detach() for name, parameter in part.named()}
    return reports, weights, {n: s["exp_avg"] for n, s in optimizer.named_state().items()}, norm


def grids_equal_one_process() -> None:
    reference = steps(ParallelContext.single())
    for tp, pp, dp in GRIDS:
        ctx = ParallelContext.build(Topology(tp=tp, pp=pp, dp=dp))
        reports, weights, means, norm = steps(ctx)
        assert norm == pytest.approx(reference[3], rel=FP64_ROUNDING)
        for ours, theirs in zip(reports, reference[0], strict=True):
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=FP64_ROUNDING)
            assert ours.num_zeros == theirs.num_zeros
        everyone: list[list[OptimizerReport]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, reports)
        assert all(other == reports for other in everyone)
        for ours_, theirs_ in ((weights, reference[1]), (means, reference[2])):
            for name, value in ours_.items():
                expected = local_slice(theirs_[name], PARAMETERS[name][1], ctx.tp.rank, ctx.tp.size)
                torch.testing.assert_close(value, expected, rtol=FP64_ROUNDING, atol=FP64_ROUNDING)


def test_every_grid_takes_the_step_of_one_process_and_counts_everything_once() -> None:
    gradient = torch.cat([whole(name, "gradient").flatten() for name in PARAMETERS])
    (first, *_), *_ = steps(ParallelContext.single())
    assert first.grad_norm == pytest.approx(float(gradient.norm()) * MULTIPLIER, rel=FP64_ROUNDING)
    assert first.num_zeros == int((gradient == 0).sum())
    run_on_ranks(4, grids_equal_one_process)


def one_bad_rank(tp: int, pp: int, dp: int, bad_rank: int) -> list[float]:
    """Only one rank, and only its own copy, sees an infinity: not even its replicas do."""
    ctx = ParallelContext.build(Topology(tp=tp, pp=pp, dp=dp))
    part = Part(ctx, torch.float16)
    ddp = DistributedDataParallel(part, ctx.dp)
    precision = PrecisionConfig(fp16=True, initial_loss_scale=8.0, hysteresis=1)
    optimizer = build_optimizer(part.named(), optimizer=CONFIG, precision=precision, ctx=ctx)
    scales = []
    for bad in (False, True, False):
        before = [parameter.clone() for parameter in part.parameters()]
        ddp.zero_grad()
        part.backward(ctx)
        ddp.all_reduce()
        if bad and ctx.rank == bad_rank:
            # split over tp where tp > 1, so that this rank is one that counts it
            dict(part.named())["embedding.weight"].main_grad[0, 0] = math.inf
            for name in ("layers.0.weight", "layers.1.weight"):
                if name in part.names:
                    dict(part.named())[name].main_grad[0, 0] = math.nan
        report = optimizer.step(learning_rate=RATE, weight_decay=DECAY)
        assert (report.applied, report.overflow) == (not bad, bad)
        same = all(map(torch.equal, before, part.parameters()))
        assert same == bad
        scales.append(optimizer.loss_scale)
    return scales


@pytest.mark.parametrize(("grid", "bad_rank"), [((2, 1, 2), 3), ((1, 2, 2), 1), ((2, 2, 1), 2)])
def test_all_ranks_skip_together_when_one_overflows(
    grid: tuple[int, int, int], bad_rank: int
) -> None:
    assert run_on_ranks(4, one_bad_rank, *grid, bad_rank) == [[8.0, 4.0, 4.0]] * 4
