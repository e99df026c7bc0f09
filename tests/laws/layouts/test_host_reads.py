"""No step waits for the device: whole steps run on `meta`, whose tensors have no values to read.

A fake process group stands in for the other ranks. What a reader would get wrong: the collectives
are real calls, but nothing arrives, so numbers are not tested here.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from megatron import device
from megatron.engine.base import PendingReport, StepPlan
from megatron.engine.native import NativeEngine
from megatron.model_build import model_build
from megatron.mpu.context import ParallelContext
from megatron.mpu.scalar_sums import ScalarSums
from megatron.mpu.topology import Topology
from megatron.optimizer import optimizer
from megatron.pipeline.executor import Executor
from pretrain_gpt import gpt_task
from tests.support.tiny import TOKENS_PER_SAMPLE, tiny_run
from tests.unit.engine.engines import runtime_of

try:
    from torch.testing._internal.distributed.fake_pg import FakeStore
except ImportError as error:  # it is internal to torch
    raise ImportError(
        "torch's fake process group is not where these tests look for it\n"
        f"  found: torch {torch.__version__}, no torch.testing._internal.distributed.fake_pg\n"
        "  fix: look for FakeStore in that version of torch, and import it from there"
    ) from error

MICRO_BATCHES = 2
META = torch.device("meta")
FP8 = {"bf16": True, "fp8_format": "hybrid", "hidden_size": 64}
ROUTED = {"num_experts": 4, "add_bias_linear": False}


class Rank(NamedTuple):
    """One rank of a world, and what its engine is asked for."""

    tp: int
    pp: int
    dp: int
    rank: int
    flags: dict[str, Any]

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


@contextmanager
def on_meta(rank: Rank) -> Iterator[ParallelContext]:
    """While inside, this process is a rank of a larger world, and its device is `meta`."""
    fused = torch_optimizer._get_fused_kernels_supported_devices
    # torch has shapes of its fused AdamW for `meta`, and no way to ask for it there.
    devices = patch.object(
        torch_optimizer, "_get_fused_kernels_supported_devices", lambda: [*fused(), "meta"]
    )
    with patch.object(device._CURRENT, "device", META), devices:
        dist.init_process_group(
            "cpu:fake,meta:fake", rank=rank.rank, world_size=rank.world_size, store=FakeStore()
        )
        try:
            yield ParallelContext.build(Topology(tp=rank.tp, pp=rank.pp, dp=rank.dp))
        finally:
            dist.destroy_process_group()


def engine_of(rank: Rank, ctx: ParallelContext) -> NativeEngine:
    config = tiny_run(
        "nowhere",
        tensor_model_parallel_size=rank.tp,
        pipeline_model_parallel_size=rank.pp,
        global_batch_size=MICRO_BATCHES * rank.dp,
        **rank.flags,
    )
    runtime = dataclasses.replace(runtime_of(config), context=ctx)
    return NativeEngine(config, gpt_task(), model_build(runtime), runtime.tokenizer)


def no_upload(*given: object, **named: object) -> Tensor:
    raise AssertionError("a tensor was made of values of the host, whose copy is waited for")


def start_steps(engine: NativeEngine, rank: Rank) -> PendingReport:
    """Start two steps, since the second one has the results of the first; return its report."""
    plan = StepPlan(MICRO_BATCHES, MICRO_BATCHES * rank.dp, 0.01, 0.1, TOKENS_PER_SAMPLE, 0)
    for _ in range(2):
        text = torch.empty((1, TOKENS_PER_SAMPLE + 1), dtype=torch.int64, device=META)
        batches = [{"text": text} for _ in range(MICRO_BATCHES)]
        # The headers of messages between stages are such tensors, once for each shape.
        make = torch.tensor if rank.pp > 1 else no_upload
        with patch.object(torch, "tensor", make), patch.object(torch, "as_tensor", make):
            report = engine.start_step(iter(batches), plan, (True, False))
    assert all(p.device == META for p in engine.stage.parameters())
    return report


RANKS = {
    "alone, fp64": Rank(1, 1, 1, 0, {}),
    "alone, with all that masks need": Rank(
        *(1, 1, 1, 0),
        {
            "bf16": True,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "reset_position_ids": True,
            "reset_attention_mask": True,
            "eod_mask_loss": True,
            "log_num_zeros_in_grad": True,
        },
    ),
    "alone, logits at once": Rank(1, 1, 1, 0, {"bf16": True, "cross_entropy_loss_fusion": False}),
    "alone, narrow state": Rank(1, 1, 1, 0, {"bf16": True, "exp_avg_dtype": "bf16"}),
    "tp x dp, fp32": Rank(2, 1, 2, 3, {"fp64": False}),
    "tp x dp, bf16": Rank(2, 1, 2, 0, {"bf16": True}),
    "tp x dp, fp16": Rank(2, 1, 2, 1, {"fp16": True}),
    "tp x dp, fp16, constant scale": Rank(2, 1, 2, 1, {"fp16": True, "loss_scale": 8.0}),
    "distributed optimizer": Rank(
        *(2, 1, 4, 5),
        {
            "bf16": True,
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
    "fully sharded": Rank(
        *(2, 1, 4, 5),
        {
            "bf16": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
    "recomputation": Rank(
        *(2, 1, 1, 1),
        {"bf16": True, "recompute_granularity": "full", "recompute_method": "uniform"},
    ),
    "fp8": Rank(2, 1, 1, 1, {**FP8, "recompute_granularity": "full", "sequence_parallel": True}),
    "fp8, delayed": Rank(2, 1, 2, 3, {**FP8, "fp8_recipe": "delayed"}),
    "fp8, blocks of 32": Rank(2, 1, 1, 0, {**FP8, "fp8_recipe": "mxfp8"}),
    "first stage": Rank(2, 2, 2, 1, {"bf16": True}),
}


@pytest.mark.parametrize("rank", RANKS.values(), ids=RANKS)
def test_a_step_reads_no_value_and_mixes_no_devices(rank: Rank) -> None:
    with on_meta(rank) as ctx:
        report = start_steps(engine_of(rank, ctx), rank)
        # What is read later is read there alone.
        with pytest.raises(NotImplementedError, match="meta tensor"):
            report()


def headers_known(executor: Executor, before: Executor) -> None:
    """Let a stage know what its messages look like, which it reads once from their headers."""
    executor._incoming = dict(before._outgoing)


def test_a_step_of_a_later_stage_reads_no_value_but_headers() -> None:
    first = Rank(2, 2, 2, 1, {"fp16": True})
    last = first._replace(rank=5)
    with on_meta(first) as ctx:
        before = engine_of(first, ctx)
        assert ctx.is_first_stage
        start_steps(before, first)
    with on_meta(last) as ctx:
        engine = engine_of(last, ctx)
        assert ctx.is_last_stage
        with pytest.raises(NotImplementedError, match="meta tensor"):
            start_steps(engine, last)
        engine = engine_of(last, ctx)
        headers_known(engine._executor, before._executor)
        start_steps(engine, last)


def with_a_read(norm: Tensor, max_norm: float) -> float:
    return min(1.0, max_norm / float(norm))


def with_a_branch(sums: ScalarSums, name: str, values: Tensor, **named: Any) -> None:
    if values.any():
        sums._parts[name] = values


def with_a_host_tensor(sums: ScalarSums, name: str, flags: Any) -> None:
    sums._parts[name] = torch.zeros(len(flags), dtype=torch.float64, device="cpu")


def with_an_upload(sums: ScalarSums, name: str, flags: Any) -> None:
    sums.add(name, torch.tensor(flags, device=META))


BREAKS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "a norm that is read": (optimizer, "clip_factor", with_a_read, "meta tensors"),
    "a branch on the device": (ScalarSums, "add", with_a_branch, "meta tensors"),
    "a tensor of the host": (ScalarSums, "add_flags", with_a_host_tensor, "meta"),
    "a copy from the host": (ScalarSums, "add_flags", with_an_upload, "values of the host"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_waits_for_the_device_is_caught(name: str) -> None:
    where, attribute, broken, message = BREAKS[name]
    rank = RANKS["tp x dp, bf16"]
    with on_meta(rank) as ctx:
        engine = engine_of(rank, ctx)
        with (
            patch.object(where, attribute, broken),
            pytest.raises((RuntimeError, AssertionError), match=message),
        ):
            start_steps(engine, rank)


@pytest.mark.parametrize("flags", [{}, {"bf16": True, "moe_expert_capacity_factor": 1.0}], ids=str)
def test_experts_wait_for_the_sizes_of_their_matrices(flags: dict[str, Any]) -> None:
    """The one part of a model that does, as docs/architecture.md says."""
    rank = Rank(1, 1, 1, 0, {**flags, **ROUTED})
    with on_meta(rank) as ctx:
        engine = engine_of(rank, ctx)
        with pytest.raises(NotImplementedError, match="meta tensor"):
            start_steps(engine, rank)


def test_experts_that_are_one_product_wait_for_nothing() -> None:
    rank = Rank(1, 1, 1, 0, {"bf16": True, **ROUTED})
    with on_meta(rank) as ctx:
        start_steps(engine_of(rank, ctx), rank)
