"""Blocks whose hidden states are split over the sequence: values, gradients, dropout, memory.

The ids of the carry stay whole, so ragged masks and positions are those of the whole sequence.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config.activations import ActivationPolicy, RecomputeMethod
from megatron.config.model import Normalization, PositionEmbedding
from megatron.config.precision import PrecisionConfig
from megatron.model.gpt_model import GPTModel
from megatron.model.losses import LossSum
from megatron.model.specs import VocabSize
from megatron.model.stage import run_layers
from megatron.mpu.collectives import all_gather, all_reduce
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import is_sequence_parallel, join_slices, partition_of
from megatron.mpu.topology import Topology
from tests.support.models import roughen, tiny_build, tiny_config, tiny_tokens
from tests.support.ranks import run_on_ranks

# float64; sums over ranks add in another order.
SAME = {"rtol": 1e-10, "atol": 1e-10}
LENGTH, BATCH, WIDTH = 12, 2, 16
RECOMPUTED = ActivationPolicy(method=RecomputeMethod.UNIFORM)

ROPE, ALIBI = PositionEmbedding.ROPE, PositionEmbedding.ALIBI
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "bloom": {"position_embedding_type": ALIBI, "embed_layernorm": True},
    "llama": {
        "position_embedding_type": ROPE,
        "normalization": Normalization.RMS_NORM,
        "swiglu": True,
        "ffn_hidden_size": 24,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    },
    "residual after norm": {"apply_residual_connection_post_layernorm": True},
}


class Computed(NamedTuple):
    total: Tensor
    hidden: Tensor  # [s, b, h] before the final norm, of documents with positions of their own
    gradients: dict[str, Tensor]  # of whole parameters


def compute(name: str, ctx: ParallelContext, split: bool) -> Computed:
    model = model_of(ctx, split, **CONFIGS[name])
    tokens = tiny_tokens(BATCH, LENGTH)
    documents = (torch.arange(LENGTH) > 4).long().expand(BATCH, LENGTH)
    positions = (torch.arange(LENGTH) - 5 * documents).contiguous()
    loss = model(tokens, positions, documents, labels=tokens.flip(1))
    loss.total.backward()
    gradients = {n: whole_gradient(p, ctx) for n, p in model.named_parameters()}
    with torch.no_grad():
        hidden = run_layers(model, model.specs[:-2], (tokens, positions, documents))[0]
        assert hidden.shape == (LENGTH // (ctx.tp.size if split else 1), BATCH, WIDTH)
    return Computed(loss.total.detach(), all_gather(hidden, ctx.tp) if split else hidden, gradients)


def model_of(ctx: ParallelContext, split: bool, **changes: Any) -> GPTModel:
    build = tiny_build(
        ctx,
        vocab=VocabSize(50, 52),
        sequence_parallel=split,
        activations=changes.pop("activations", ActivationPolicy()),
        precision=changes.pop("precision", PrecisionConfig(fp64=True)),
    )
    model = GPTModel(tiny_config(**changes), build)
    roughen(model, ctx)
    return model


def whole_gradient(parameter: Tensor, ctx: ParallelContext) -> Tensor:
    """The gradient of the whole parameter, from every rank's part or summand."""
    assert parameter.grad is not None
    if is_sequence_parallel(parameter):
        return all_reduce(parameter.grad.clone(), ctx.tp)
    parts = list(all_gather(parameter.grad.unsqueeze(0), ctx.tp))
    partition = partition_of(parameter)
    return parts[0] if partition is None else join_slices(parts, partition)


def every_configuration() -> dict[str, Computed]:
    ctx = ParallelContext.build(Topology(tp=dist.get_world_size()))
    return {name: compute(name, ctx, split=True) for name in CONFIGS}


@pytest.mark.parametrize("tp", [2, 4])
def test_split_sequences_give_the_values_and_gradients_of_one_rank(tp: int) -> None:
    ranks = run_on_ranks(tp, every_configuration)
    for name in CONFIGS:
        alone = compute(name, ParallelContext.single(), split=False)
        for results in ranks:
            torch.testing.assert_close(results[name]._asdict(), alone._asdict(), **SAME)


class Dropped(NamedTuple):
    total: Tensor
    gradients: dict[str, Tensor]
    zeros: Tensor  # which elements of the embedding's output were dropped
    passes: int  # how often the first block was computed


def dropped(split: bool, recomputed: bool) -> Dropped:
    ctx = ParallelContext.build(Topology(tp=dist.get_world_size()))
    policy = RECOMPUTED if recomputed else ActivationPolicy()
    model = model_of(ctx, split, hidden_dropout=0.3, attention_dropout=0.3, activations=policy)
    masks: list[Tensor] = []
    passes: list[None] = []
    model.layers.get_submodule("0").register_forward_pre_hook(lambda *args: passes.append(None))
    model.embedding.register_forward_hook(lambda *args: masks.append(args[2][0] == 0))
    tokens = tiny_tokens(BATCH, LENGTH)
    loss = model(tokens, labels=tokens)
    assert isinstance(loss, LossSum)
    loss.total.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Dropped(loss.total.detach(), gradients, masks[0], len(passes))


def test_ranks_that_split_a_sequence_drop_what_one_drops_and_so_does_recomputation() -> None:
    (alone,) = run_on_ranks(1, dropped, False, False)
    plain, again = run_on_ranks(2, dropped, True, False), run_on_ranks(2, dropped, True, True)
    assert 0.15 < alone.zeros.double().mean() < 0.45
    assert torch.equal(torch.cat([rank.zeros for rank in plain]), alone.zeros)
    for first, second in zip(plain, again):
        assert (first.passes, second.passes) == (1, 2)
        torch.testing.assert_close(first.total, alone.total, **SAME)
        assert torch.equal(first.total, second.total)
        assert torch.equal(first.zeros, second.zeros)
        assert all(torch.equal(g, second.gradients[n]) for n, g in first.gradients.items())


def saved_between_layers(split: bool) -> list[torch.Size]:
    """Shapes of what is saved for backward and is as wide as hidden states are."""
    ctx = ParallelContext.build(Topology(tp=dist.get_world_size()))
    model, shapes = model_of(ctx, split, embed_layernorm=True, hidden_dropout=0.1), []

    def note(tensor: Tensor) -> Tensor:
        if tensor.shape[1:] == (BATCH, WIDTH):
            shapes.append(tensor.shape)
        return tensor

    tokens = tiny_tokens(BATCH, LENGTH)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(tokens, labels=tokens)
    return shapes


def test_nothing_of_a_whole_sequence_is_kept_between_layers() -> None:
    part = torch.Size([LENGTH // 2, BATCH, WIDTH])
    split, unsplit = (run_on_ranks(2, saved_between_layers, how)[1] for how in (True, False))
    assert set(split) == {part}
    assert len(split) == len(unsplit)
    assert set(unsplit) == {torch.Size([LENGTH, BATCH, WIDTH])}


def trained_in_bf16() -> tuple[float, bool]:
    ctx = ParallelContext.build(Topology(tp=dist.get_world_size()))
    precision = PrecisionConfig(bf16=True, fp32_residual_connection=True)
    model = model_of(ctx, ctx.tp.size > 1, precision=precision)
    tokens = tiny_tokens(BATCH, LENGTH)
    loss = model(tokens, labels=tokens.flip(1))
    loss.total.backward()
    return float(loss.mean), all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_split_fp32_stream_of_a_bf16_model_stays_within_rounding() -> None:
    ((alone, _),) = run_on_ranks(1, trained_in_bf16)
    for loss, finite in run_on_ranks(2, trained_in_bf16):
        assert finite
        # A number in bfloat16 is off by 2^-9, and the logits of rough weights are large.
        assert loss == pytest.approx(alone, rel=5 * 2**-9)
