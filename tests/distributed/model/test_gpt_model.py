"""A GPT shared by two or four ranks computes what it computes on one.

The bodies run every configuration of a table in one start of the processes. Padding depends on
the number of ranks, as in training, so padded sizes differ and may not matter.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config.model import (
    GluActivation,
    ModelConfig,
    Normalization,
    PositionEmbedding,
)
from megatron.model.gpt_model import GPTModel
from megatron.model.init import initialize_parameters
from megatron.model.losses import LossSum
from megatron.model.specs import VocabSize
from megatron.mpu.collectives import all_gather
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import is_sequence_parallel, join_slices, partition_of
from megatron.mpu.topology import Topology
from tests.support.models import roughen, tiny_build, tiny_config, tiny_tokens
from tests.support.ranks import run_on_ranks

# float64; sums over ranks add in another order.
SAME = {"rtol": 1e-10, "atol": 1e-10}
TRUE_VOCAB = 51

ROPE, ALIBI = PositionEmbedding.ROPE, PositionEmbedding.ALIBI
CONFIGS: dict[str, tuple[dict[str, Any], bool]] = {
    "gpt2": ({}, False),
    "recomputed": ({"embed_layernorm": True}, True),
    "grouped rope": (
        {"num_attention_heads": 8, "num_query_groups": 4, "position_embedding_type": ROPE},
        False,
    ),
    "alibi": ({"position_embedding_type": ALIBI}, False),
    "llama": (
        {
            "position_embedding_type": ROPE,
            "normalization": Normalization.RMS_NORM,
            "swiglu": True,
            "ffn_hidden_size": 24,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True,
        },
        False,
    ),
    "side by side, norms of heads, a window": (
        {
            "num_attention_heads": 8,
            "num_query_groups": 4,
            "position_embedding_type": ROPE,
            "rotary_percent": 1.0,
            "use_rope_scaling": True,
            "rope_scaling_original_length": 8,
            "add_bias_linear": False,
            "add_qkv_bias": True,
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "sliding_window": 4,
        },
        True,
    ),
    "geglu recomputed": (
        {
            "glu_activation": GluActivation.GEGLU,
            "ffn_hidden_size": 24,
            "apply_residual_connection_post_layernorm": True,
        },
        True,
    ),
}


class Computed(NamedTuple):
    logits: Tensor  # [s, b, v], true vocabulary
    total: Tensor
    gradients: dict[str, Tensor]  # of whole parameters, without padding rows
    documents: Tensor  # logits of a packed row


def configured(name: str) -> ModelConfig:
    return tiny_config(**CONFIGS[name][0])


def compute(name: str, ctx: ParallelContext) -> Computed:
    tp = ctx.tp.size
    build = tiny_build(
        ctx,
        vocab=VocabSize(TRUE_VOCAB, -(-TRUE_VOCAB // (3 * tp)) * 3 * tp),
        recompute=CONFIGS[name][1],
    )
    model = GPTModel(configured(name), build)
    roughen(model, ctx)
    tokens = tiny_tokens()
    loss = model(tokens, labels=tokens.flip(1), loss_mask=(tokens % 5 > 0).double())
    assert isinstance(loss, LossSum)
    loss.total.backward()
    gradients = {
        parameter_name: whole(parameter, ctx)[: true_rows(parameter_name)]
        for parameter_name, parameter in model.named_parameters()
    }
    documents = (torch.arange(9) > 4).long().expand(2, 9)
    with torch.no_grad():
        logits = all_gather(model(tokens), ctx.tp, dim=-1)[..., :TRUE_VOCAB]
        packed = model(tokens, torch.arange(9).expand(2, 9), documents)
        packed = all_gather(packed, ctx.tp, dim=-1)[..., :TRUE_VOCAB]
    return Computed(logits, loss.total.detach(), gradients, packed)


def whole(parameter: Tensor, ctx: ParallelContext) -> Tensor:
    """The gradient of the whole parameter, from every rank's part."""
    assert parameter.grad is not None
    gathered = all_gather(parameter.grad.unsqueeze(0), ctx.tp)
    if is_sequence_parallel(parameter):  # of norms of heads every rank has a summand
        return gathered.sum(dim=0)
    if partition_of(parameter) is None:
        for other in gathered:
            assert torch.equal(other, gathered[0]), "replicated parameters have equal gradients"
        return gathered[0]
    return join_slices(list(gathered), partition_of(parameter))


def true_rows(name: str) -> int | None:
    return TRUE_VOCAB if name in ("embedding.word.weight", "output.weight") else None


def every_configuration() -> dict[str, Computed]:
    ctx = ParallelContext.build(Topology(tp=dist.get_world_size()))
    return {name: compute(name, ctx) for name in CONFIGS}


@pytest.mark.parametrize("tp", [2, 4])
def test_logits_loss_and_gradients_equal_those_of_one_rank(tp: int) -> None:
    for results in run_on_ranks(tp, every_configuration):
        for name in CONFIGS:
            alone, shared = compute(name, ParallelContext.single()), results[name]
            torch.testing.assert_close(shared.logits, alone.logits, **SAME)
            torch.testing.assert_close(shared.documents, alone.documents, **SAME)
            torch.testing.assert_close(shared.total, alone.total, **SAME)
            torch.testing.assert_close(shared.gradients, alone.gradients, **SAME)


def started(seed: int) -> dict[str, Tensor]:
    ctx = ParallelContext.build(Topology(tp=dist.get_world_size()))
    return start_values("geglu recomputed", ctx, seed) | start_values("grouped rope", ctx, seed)


def start_values(name: str, ctx: ParallelContext, seed: int) -> dict[str, Tensor]:
    build = tiny_build(ctx, vocab=VocabSize(TRUE_VOCAB, 13 * 4 * ctx.tp.size))
    model = GPTModel(configured(name), build)
    initialize_parameters(model, seed=seed, ctx=ctx)
    values = {}
    for parameter_name, parameter in model.named_parameters():
        parts = list(all_gather(parameter.detach().unsqueeze(0), ctx.tp))
        joined = (
            join_slices(parts, partition_of(parameter)) if partition_of(parameter) else parts[0]
        )
        values[f"{name}.{parameter_name}"] = joined[: true_rows(parameter_name)]
    return values


def test_the_same_values_start_every_layout() -> None:
    alone = ParallelContext.single()
    expected = start_values("geglu recomputed", alone, 9) | start_values("grouped rope", alone, 9)
    for values in run_on_ranks(4, started, 9):
        for name, value in expected.items():
            assert torch.equal(values[name], value), name


def dropped(recompute: bool) -> tuple[Tensor, dict[str, Tensor]]:
    ctx = ParallelContext.build(Topology(tp=dist.get_world_size()))
    config = tiny_config(hidden_dropout=0.3, attention_dropout=0.3)
    build = tiny_build(ctx, recompute=recompute)
    model = GPTModel(config, build)
    roughen(model, ctx)
    tokens = tiny_tokens()
    loss = model(tokens, labels=tokens)
    assert isinstance(loss, LossSum)
    loss.total.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.total.detach(), gradients


def test_with_dropout_every_layout_is_one_process_and_recomputation_repeats_it() -> None:
    (alone,) = run_on_ranks(1, dropped, False)
    plain, again = run_on_ranks(2, dropped, False), run_on_ranks(2, dropped, True)
    assert torch.equal(plain[0][0], plain[1][0])
    for rank in range(2):
        assert torch.equal(plain[rank][0], again[rank][0])
        assert all(torch.equal(g, again[rank][1][n]) for n, g in plain[rank][1].items())
    replicated = "layers.0.attention.output.bias"
    assert torch.equal(plain[0][1][replicated], plain[1][1][replicated])
    torch.testing.assert_close(plain[0][0], alone[0], **SAME)
    torch.testing.assert_close(plain[0][1][replicated], alone[1][replicated], **SAME)
