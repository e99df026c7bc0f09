"""Tests of gathering updated parameters over data-parallel ranks."""

import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config.run import RunConfig
from megatron.mpu.collectives import Pending, start_all_gather
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.topology import Topology
from megatron.optimizer import param_buffer, sharded_parameters
from megatron.optimizer.grad_buffer import GradBuffer
from megatron.optimizer.param_buffer import ParameterBuffer
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP64,
    MODELS,
    Record,
    assert_close,
    tiny_run,
    train,
    write_tiny_corpus,
)


class LateGather:
    """A gather that does all of its work in `wait`; until then the shares of others are NaN."""

    def __init__(self, tensor: Tensor, group: Group, out: Tensor) -> None:
        self._mine, self._group, self._out = tensor.clone(), group, out
        out.fill_(math.nan)
        tensor.copy_(self._mine)

    def wait(self) -> Tensor:
        return start_all_gather(self._mine, self._group, out=self._out).wait()


def late_gather(tensor: Tensor, group: Group, *, out: Tensor) -> "LateGather | Pending":
    return Pending(out, None) if group.size == 1 else LateGather(tensor, group, out)


def buckets_arrive(overlap: bool, held: bool) -> None:
    param_buffer.start_all_gather = late_gather  # type: ignore[assignment]  # in this process only
    ctx = ParallelContext.build(Topology(dp=dist.get_world_size()))
    module = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    for index, part in enumerate(module):
        nn.init.constant_(part.weight, float(index))
    if held:
        vars(module[2].weight)["reduce_first"] = True
    gradients = GradBuffer(
        module.named_parameters(), ctx.replicas, gradient_dtype=torch.float32, bucket_elements=1
    )
    buffer = ParameterBuffer(module, gradients.flats, overlap=overlap)
    for part in module:
        start, stop = buffer.owned(part.weight)
        part.weight.detach().view(-1)[start:stop].add_(10.0)
    buffer.gather()
    weights = [part.weight for part in module]
    late = [bool(weight.isnan().any()) for weight in weights]
    assert late == ([True, True, not held] if overlap else [False] * 3)
    module[1](torch.zeros(1, 16))  # in any order: a pipeline's chunks take turns
    assert torch.equal(weights[1], torch.full((16, 16), 11.0))
    assert bool(weights[0].isnan().any()) == overlap
    buffer.wait_for([weights[0], None, nn.Parameter(torch.ones(1))])
    assert torch.equal(weights[0], torch.full((16, 16), 10.0))
    buffer.wait()
    assert torch.equal(weights[2], torch.full((16, 16), 12.0))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_module_that_is_called_has_its_parameters(overlap: bool, held: bool) -> None:
    run_on_ranks(2, partial(buckets_arrive, overlap, held))


def train_with_late_gathers(configs: list[RunConfig]) -> list[Record]:
    for module in (param_buffer, sharded_parameters):  # in this process only
        module.start_all_gather = late_gather  # type: ignore[assignment]
    return [train(config) for config in configs]


SHARDED: dict[str, Any] = {
    "num_layers": 4,
    "micro_batch_size": 2,
    "train_iters": 3,
    "ddp_bucket_size": 500,
    "use_distributed_optimizer": True,
    "overlap_param_gather": True,
    "eval_iters": 1,
    "eval_interval": 2,
    "log_params_norm": True,
}


ALL_MODELS = ("gpt2", "llama", "bloom")
WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {"recompute_granularity": "full"},
    "interleaved": {"num_virtual_stages_per_pipeline_rank": 2},
    "zero-bubble": {"pipeline_schedule": "zero-bubble"},
}
IN_TURN = list(zip(ALL_MODELS, WAYS, strict=True))
FULLY_SHARDED = {"data_parallel_sharding_strategy": "optim_grads_params"}
MORE_WAYS = WAYS | {"fully sharded": {**FULLY_SHARDED, "recompute_granularity": "full"}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def alone(corpus: str) -> dict[str, Record]:
    """What one process does of each model, which has nothing to gather."""
    runs = [tiny_run(corpus, **MODELS[model], **SHARDED) for model in ALL_MODELS]
    (records,) = run_on_ranks(1, train_with_late_gathers, runs)
    return dict(zip(ALL_MODELS, records, strict=True))


@pytest.mark.parametrize(
    ("pp", "cases"),
    [
        (1, [*((model, "recomputed") for model in ALL_MODELS), ("gpt2", "fully sharded")]),
        (2, [*IN_TURN, ("gpt2", "fully sharded")]),
        pytest.param(
            2,
            [pair for pair in itertools.product(ALL_MODELS, WAYS) if pair not in IN_TURN],
            marks=pytest.mark.wide,
        ),
    ],
    ids=["replicas", "pipeline", "pipeline, all other models"],
)
def test_nothing_of_a_run_reads_parameters_that_are_still_to_come(
    corpus: str,
    alone: dict[str, Record],
    tmp_path: Path,
    pp: int,
    cases: list[tuple[str, str]],
) -> None:
    """With every model, interleaving, recomputation, evaluation, norms and checkpoints."""
    configs = [
        tiny_run(
            corpus,
            **MODELS[model],
            **SHARDED,
            **MORE_WAYS[way],
            pipeline_model_parallel_size=pp,
            save=str(tmp_path / str(at)),
        )
        for at, (model, way) in enumerate(cases)
    ]
    found = run_on_ranks(2 * pp, train_with_late_gathers, configs)[0]
    for record, (model, _) in zip(found, cases, strict=True):
        reference = alone[model]
        assert_close(record.losses, reference.losses, FP64)
        assert_close(record.grad_norms, reference.grad_norms, FP64)
        means = [[evaluation.mean for evaluation in r.evaluations] for r in (record, reference)]
        assert_close(*means, FP64)
