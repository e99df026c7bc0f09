"""Two ranks that share a model give a sequence the same bits in any company, and agree on it."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron.config.model import PositionEmbedding
from megatron.config.precision import PrecisionConfig
from megatron.inference import kernel_attention, paged_attention
from megatron.inference.forward import ForwardExecutor
from megatron.inference.invariance import BatchInvariance, probe_batch_invariance
from megatron.model.geometry import CachedHeads
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import VocabSize
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.models import roughen, tiny_build, tiny_config
from tests.support.ranks import run_on_ranks


def depending(exact: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return attention that depends on the number of tokens of a step."""

    def attend(self: object, layer: int, heads: CachedHeads, **kwargs: Any) -> Tensor:
        return exact(self, layer, heads, **kwargs) * (1 + (len(heads.queries) > 400))

    return attend


def probed_on_ranks() -> list[BatchInvariance]:
    ctx = ParallelContext.build(Topology(tp=dist.get_world_size()))
    config = tiny_config(
        hidden_size=128,
        num_query_groups=2,
        position_embedding_type=PositionEmbedding.ROPE,
        init_method_std=0.1,
    )
    found = []
    for precision in (PrecisionConfig(), PrecisionConfig(bf16=True)):
        model = GPTModel(config, tiny_build(ctx, vocab=VocabSize(300, 304), precision=precision))
        roughen(model, ctx)
        executor = ForwardExecutor(model.eval(), ctx, blocks=30)
        found.append(probe_batch_invariance(executor, model, ctx))
    if ctx.tp.rank == 1:  # alone, and every rank has to know
        for attention in (paged_attention.PagedAttention, kernel_attention.KernelAttention):
            attention.attend = depending(attention.attend)  # type: ignore[method-assign]
    found.append(probe_batch_invariance(executor, model, ctx))
    return found


def test_two_ranks_give_equal_bits_and_know_of_each_others_differences() -> None:
    differs = BatchInvariance(("attention to many keys",))
    for found in run_on_ranks(2, probed_on_ranks):
        assert found == [BatchInvariance(()), BatchInvariance(()), differs]
