"""GPT against a plain second implementation, for every switch; and what must hold for all."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.blocks import NormPlacement, QkNormScope
from megatron.config.model import (
    GluActivation,
    ModelConfig,
    Normalization,
    PositionEmbedding,
    RopeType,
    SoftmaxType,
)
from megatron.config.precision import PrecisionConfig
from megatron.config.training import AttentionBackend
from megatron.errors import ConfigError, MegatronError
from megatron.inference.forward import ForwardExecutor
from megatron.model import gpt_model
from megatron.model.gpt_model import GPTModel, GPTModelPipe, gpt_carry, gpt_layers
from megatron.model.losses import LossSum
from megatron.mpu.context import ParallelContext
from megatron.mpu.linear_cross_entropy import LossState
from megatron.mpu.partition import is_sequence_parallel, partition_of
from megatron.mpu.random import Samples
from megatron.mpu.stage_plan import LayerRange
from megatron.ops import prefix_attention, row_products
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice
from tests.support.models import (
    TINY_VOCAB,
    roughen,
    second_of_two,
    tiny_build,
    tiny_config,
    tiny_model,
    tiny_tokens,
)
from tests.support.naive_gpt import naive_logits
from tests.support.tiny import MODELS, tiny_run

# float64 on both sides: only the order of additions differs.
SAME = {"rtol": 1e-10, "atol": 1e-10}

SWITCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "rope": {"position_embedding_type": "rope"},
    "partial rope": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "rotary_base": 100.0,
    },
    "rope in some layers": {"position_embedding_type": "rope", "no_rope_freq": "[1,0]"},
    "alibi": {"position_embedding_type": "alibi"},
    "alibi of six heads": {
        "position_embedding_type": "alibi",
        "num_attention_heads": 6,
        "hidden_size": 24,
    },
    "no positions": {"position_embedding_type": "none"},
    "rmsnorm": {"normalization": "RMSNorm", "layernorm_epsilon": 1e-2},
    "swiglu": {"swiglu": True, "ffn_hidden_size": 24},
    "geglu": {"glu_activation": "geglu"},
    "liglu": {"glu_activation": "liglu"},
    "reglu": {"glu_activation": "reglu"},
    "squared relu": {"squared_relu": True},
    "relu": {"relu": True},
    "erf gelu": {"onnx_safe": True},
    "tanh gelu": {"openai_gelu": True},
    "no biases": {"add_bias_linear": False},
    "qkv bias alone": {"add_bias_linear": False, "add_qkv_bias": True},
    "untied": {"untie_embeddings_and_output_weights": True},
    "embedding norm": {"embed_layernorm": True},
    "residual after norm": {"apply_residual_connection_post_layernorm": True},
    "grouped queries": {"num_query_groups": 2},
    "grouped queries with rope": {"num_query_groups": 2, "position_embedding_type": "rope"},
    "grouped queries with alibi": {"num_query_groups": 2, "position_embedding_type": "alibi"},
    "multi-query": {"num_query_groups": 1},
    "wide heads": {"kv_channels": 6, "position_embedding_type": "rope"},
    "side by side": {"use_parallel_residual": True},
    "norms of queries and keys": {"qk_layernorm": True, "num_query_groups": 2},
    "rms norms of queries and keys": {
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
    },
    "norms of all queries and of all keys": {
        "qk_layernorm": True,
        "qk_layernorm_scope": "all-heads",
        "num_query_groups": 2,
    },
    "olmo 2": {
        "norm_placement": "after",
        "qk_layernorm": True,
        "qk_layernorm_scope": "all-heads",
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "num_query_groups": 2,
    },
    "norms after, side by side": {"norm_placement": "after", "use_parallel_residual": True},
    "norms on both sides": {"norm_placement": "both"},
    "granite's factors": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "softmax_scale": 0.3,
        "logit_divisor": 4.0,
    },
    "granite's factors, untied, a norm of the embedding": {
        "embedding_multiplier": 3.0,
        "embed_layernorm": True,
        "logit_divisor": 4.0,
        "untie_embeddings_and_output_weights": True,
    },
    "soft caps": {"attention_soft_cap": 0.7, "logit_soft_cap": 1.5, "num_query_groups": 2},
    "soft caps, untied, sinks, a window and alibi": {
        "attention_soft_cap": 0.7,
        "logit_soft_cap": 1.5,
        "untie_embeddings_and_output_weights": True,
        "softmax_type": "learnable",
        "sliding_window": 4,
        "position_embedding_type": "alibi",
    },
    "gemma 3": {
        "position_embedding_type": "rope",
        "sliding_window": 4,
        "window_attn_skip_freq": "2",
        "window_rotary_base": 50.0,
        "rotary_seq_len_interpolation_factor": 8.0,
        "glu_activation": "geglu_tanh",
        "norm_placement": "both",
        "qk_layernorm": True,
        "normalization": "RMSNorm",
    },
    "window": {"sliding_window": 4},
    "window with alibi": {"sliding_window": 6, "position_embedding_type": "alibi"},
    "window as long as the sequence": {"sliding_window": 9},
    "gpt-oss's gated unit": {
        "glu_activation": "quick_geglu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 0.05,
    },
    "off by one": {"softmax_type": "off-by-one"},
    "sinks": {"softmax_type": "learnable", "num_query_groups": 2},
    "sinks, a window and alibi": {
        "softmax_type": "learnable",
        "sliding_window": 4,
        "position_embedding_type": "alibi",
    },
    "window in the first layer": {"sliding_window": 4, "window_attn_skip_freq": "2"},
    "window in the second layer with alibi": {
        "sliding_window": 4,
        "window_attn_skip_freq": "[0,1]",
        "position_embedding_type": "alibi",
    },
    "interpolated positions": {
        "position_embedding_type": "rope",
        "rotary_seq_len_interpolation_factor": 3.0,
    },
    "yarn": {
        "position_embedding_type": "rope",
        "rotary_base": 100.0,
        "kv_channels": 16,
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 40,
        "yarn_beta_fast": 8.0,
    },
    "yarn with a range between channels, of a part of a head": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "rotary_base": 100.0,
        "kv_channels": 16,
        "rope_type": "yarn",
        "rotary_scaling_factor": 8.0,
        "yarn_original_max_position_embeddings": 40,
        "yarn_beta_fast": 3.0,
        "yarn_correction_range_round_to_int": False,
        "mscale": 0.7,
        "mscale_all_dim": 1.5,
    },
    "scaled frequencies": {
        "position_embedding_type": "rope",
        "rotary_base": 100.0,
        "kv_channels": 16,
        "use_rope_scaling": True,
        "rope_scaling_original_length": 40,
    },
}


def config_of(switch: str) -> ModelConfig:
    changes = dict(SWITCHES[switch])
    kinds = {
        "position_embedding_type": PositionEmbedding,
        "normalization": Normalization,
        "glu_activation": GluActivation,
        "softmax_type": SoftmaxType,
        "norm_placement": NormPlacement,
        "qk_layernorm_scope": QkNormScope,
        "rope_type": RopeType,
    }
    return tiny_config(**{k: kinds[k](v) if k in kinds else v for k, v in changes.items()})


@pytest.mark.parametrize("switch", SWITCHES)
def test_logits_equal_those_of_the_naive_gpt(switch: str) -> None:
    config = config_of(switch)
    model, tokens = tiny_model(config), tiny_tokens()
    expected = naive_logits(config, model.state_dict(), tokens)
    torch.testing.assert_close(model(tokens).transpose(0, 1), expected, **SAME)


@pytest.mark.parametrize(
    "switch",
    [
        *("default", "rope", "alibi", "grouped queries", "grouped queries with rope", "window"),
        *("window in the first layer", "window in the second layer with alibi"),
    ],
)
def test_documents_in_one_row_cannot_see_each_other(switch: str) -> None:
    config = config_of(switch)
    model, tokens = tiny_model(config), tiny_tokens(batch=2, length=9)
    cuts = ([4, 5], [2, 7])
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in cuts])
    document_ids = torch.tensor([[0] * 4 + [1] * 5, [3] * 2 + [4] * 7])
    packed = model(tokens, position_ids, document_ids)
    expected = naive_logits(config, model.state_dict(), tokens, position_ids, document_ids)
    torch.testing.assert_close(packed.transpose(0, 1), expected, **SAME)
    for row, lengths in enumerate(cuts):
        start = 0
        for length in lengths:
            alone = model(tokens[row : row + 1, start : start + length])
            torch.testing.assert_close(packed[start : start + length, row : row + 1], alone, **SAME)
            start += length


# Row 0: two documents, of which the second has no prefix; row 1: one that is nothing but prefix.
PREFIXED = (
    torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8]]),
    torch.tensor([[0] * 5 + [1] * 4, [3] * 9]),
    torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0, 0], [1] * 9]),
)


@pytest.mark.parametrize(
    "switch",
    [
        *("default", "rope", "alibi", "grouped queries", "grouped queries with rope", "window"),
        *("soft caps", "sinks", "window in the second layer with alibi", "gemma 3"),
    ],
)
@pytest.mark.parametrize("pairs_of_a_span", [0, prefix_attention.PAIRS_OF_A_SPAN])
def test_the_tokens_of_a_prefix_see_each_other(
    switch: str, pairs_of_a_span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By blocks, where attention may be split, and by a mask."""
    monkeypatch.setattr(prefix_attention, "PAIRS_OF_A_SPAN", pairs_of_a_span)
    config = config_of(switch)
    model, tokens = tiny_model(config), tiny_tokens(batch=2, length=9)
    positions, documents, prefixes = PREFIXED
    packed = model(tokens, positions, documents, is_prefix=prefixes)
    expected = naive_logits(config, model.state_dict(), tokens, *PREFIXED)
    torch.testing.assert_close(packed.transpose(0, 1), expected, **SAME)
    causal = model(tokens, positions, documents)
    assert not torch.allclose(packed[0], causal[0])
    torch.testing.assert_close(packed[5:, 0], causal[5:, 0], **SAME)  # of the second document


@pytest.mark.parametrize("backend", [AttentionBackend.AUTO, AttentionBackend.UNFUSED])
def test_blocks_and_a_mask_give_one_loss_and_one_gradient(
    backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default attends block by block on a CPU; a backend that is named has a mask."""
    monkeypatch.setattr(prefix_attention, "PAIRS_OF_A_SPAN", 0)
    config, tokens = config_of("grouped queries with rope"), tiny_tokens(batch=2, length=10)
    gradients = []
    for build in (tiny_build(), tiny_build(attention_backend=backend, recompute=True)):
        model = tiny_model(config, build)
        loss = model(
            tokens[:, :-1], *PREFIXED[:2], labels=tokens[:, 1:], is_prefix=PREFIXED[2].bool()
        )
        assert isinstance(loss, LossSum)
        loss.total.backward()
        gradients.append([loss.total, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*gradients, **SAME)


def test_prefixes_without_document_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="prefixes were given without document ids"):
        gpt_carry(tiny_tokens(), is_prefix=torch.ones(2, 9))


def test_prefixes_longer_than_a_row_are_refused() -> None:
    tokens = tiny_tokens()
    with pytest.raises(ConfigError, match="in other rows than those of the tokens") as raised:
        gpt_carry(tokens, tokens, tokens, torch.ones(2, 10))
    assert "is_prefix [2, 10], tokens [2, 9]" in str(raised.value)


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_token_changes_nothing_before_it(switch: str) -> None:
    model, tokens = tiny_model(config_of(switch)), tiny_tokens()
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % TINY_VOCAB.true
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:5], after[:5], rtol=0, atol=0)
    assert not torch.allclose(before[5:], after[5:])


@pytest.mark.parametrize(
    "switch",
    [
        *("default", "grouped queries with rope", "swiglu", "untied", "alibi", "side by side"),
        *("norms of queries and keys", "rms norms of queries and keys", "window"),
        *("norms of all queries and of all keys", "olmo 2", "granite's factors", "soft caps"),
    ],
)
def test_the_gradient_is_the_slope_of_the_loss(switch: str) -> None:
    """Against central differences along one random direction of all parameters."""
    model, tokens = tiny_model(config_of(switch)), tiny_tokens()

    def loss() -> Tensor:
        result = model(tokens[:, :-1], labels=tokens[:, 1:])
        assert isinstance(result, LossSum)
        return result.total

    loss().backward()
    generator = torch.Generator().manual_seed(1)
    directions = [
        torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in model.parameters()
    ]
    slope = sum(float((p.grad * d).sum()) for p, d in zip(model.parameters(), directions))
    step, values = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2):
            for p, d in zip(model.parameters(), directions):
                p.add_(d, alpha=sign * step)
            values.append(float(loss()))
    # Truncation is of the order step^2 x third derivative; rounding 1e-16 x loss / step.
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_parameter_gets_a_gradient(switch: str) -> None:
    model, tokens = tiny_model(config_of(switch)), tiny_tokens()
    model(tokens, labels=tokens).total.backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_grouped_queries_equal_heads_with_repeated_keys() -> None:
    grouped = tiny_model(tiny_config(num_query_groups=2, add_bias_linear=False))
    plain = GPTModel(tiny_config(add_bias_linear=False), tiny_build())
    state = grouped.state_dict()
    for name in [n for n in state if n.endswith("qkv.weight")]:
        parts = state[name].view(2, 4, 4, 16)  # [group, q q k v, d, h]
        q, k, v = parts[:, :2], parts[:, 2:3], parts[:, 3:]
        every = torch.stack((q, k.expand_as(q), v.expand_as(q)), dim=2)  # [group, q, qkv, d, h]
        state[name] = every.reshape(48, 16)
    plain.load_state_dict(state)
    tokens = tiny_tokens()
    torch.testing.assert_close(grouped(tokens), plain(tokens), **SAME)


def test_rotary_models_see_only_relative_positions() -> None:
    model = tiny_model(config_of("rope"))
    tokens = tiny_tokens()
    shifted = torch.arange(9).expand(2, 9) + 1000
    torch.testing.assert_close(model(tokens, shifted), model(tokens), rtol=1e-8, atol=1e-8)


def test_the_whole_is_the_same_in_any_number_of_stages() -> None:
    config = config_of("grouped queries with rope")
    model, tokens = tiny_model(config), tiny_tokens()
    position_ids = torch.arange(9).expand(2, 9) + 1
    document_ids = (torch.arange(9) > 3).long().expand(2, 9)
    expected = model(tokens, position_ids, document_ids)
    for cuts in ([0, 5], [0, 2, 5], [0, 1, 3, 4, 5]):
        pipe = GPTModelPipe(config, tiny_build())
        names: set[str] = set()
        carry = gpt_carry(tokens, position_ids, document_ids)
        for start, stop in itertools.pairwise(cuts):
            stage = pipe.stage(LayerRange(start, stop))
            part = {n: t for n, t in model.state_dict().items() if n in stage.state_dict()}
            stage.load_state_dict(part)
            names |= part.keys()
            carry = stage(carry)
        assert names == model.state_dict().keys()
        torch.testing.assert_close(carry[0], expected, rtol=0, atol=0)


def test_a_last_stage_holds_the_tied_table_and_nothing_else_of_the_embedding() -> None:
    pipe = GPTModelPipe(tiny_config(embed_layernorm=True), tiny_build())
    last = pipe.stage(LayerRange(3, 5))
    assert [n for n, _ in last.named_parameters()] == [
        "final_norm.weight",
        "final_norm.bias",
        "embedding.word.weight",
    ]
    first = pipe.stage(LayerRange(0, 1))
    assert (
        list(first.tied_parameters()) == list(last.tied_parameters()) == ["embedding.word.weight"]
    )
    assert pipe.stage(LayerRange(1, 3)).tied_parameters() == {}


@pytest.mark.parametrize(
    "name",
    [
        *("default", "untied", "granite's factors"),
        "granite's factors, untied, a norm of the embedding",
        *("soft caps", "soft caps, untied, sinks, a window and alibi"),
    ],
)
def test_a_list_with_a_fused_loss_ends_without_logits(name: str) -> None:
    config, tokens, labels = config_of(name), tiny_tokens(), tiny_tokens(seed=1)
    mask = (tokens % 5 > 0).double()
    losses, gradients = [], []
    for fuse in (False, True):
        state = LossState(soft_cap=config.logit_soft_cap)
        pipe = GPTModelPipe(config, tiny_build(fuse_loss=fuse, loss_state=state))
        stage = pipe.stage(LayerRange(0, len(pipe.specs)))
        roughen(stage, pipe.build.ctx)
        carry = stage(gpt_carry(tokens))
        vocabulary = TINY_VOCAB.padded in [size for tensor in carry for size in tensor.shape[2:]]
        assert vocabulary != fuse
        losses.append(pipe.loss(carry, labels, mask))
        losses[-1].total.backward()
        gradients.append({name: p.grad for name, p in stage.named_parameters()})
    torch.testing.assert_close(losses[1], losses[0], **SAME)
    torch.testing.assert_close(gradients[1], gradients[0], **SAME)


def test_a_fused_loss_with_another_soft_cap_than_the_model_is_refused() -> None:
    with pytest.raises(MegatronError, match="another soft cap than the model"):
        GPTModelPipe(config_of("soft caps"), tiny_build(fuse_loss=True))


def test_a_whole_model_has_logits_whatever_its_loss() -> None:
    model = tiny_model(config_of("default"), tiny_build(fuse_loss=True))
    assert model(tiny_tokens()).shape == (9, 2, TINY_VOCAB.padded)
    assert isinstance(model(tiny_tokens(), labels=tiny_tokens()), LossSum)


def test_untied_models_have_an_output_of_their_own_and_nothing_to_share() -> None:
    model = tiny_model(config_of("untied"))
    assert "output.weight" in model.state_dict()
    assert all(spec.tied is None for spec in model.specs)
    assert gpt_layers(tiny_config(), tiny_build())[-1].name == "embedding.word"


def test_padding_tokens_do_not_change_the_loss() -> None:
    tokens = tiny_tokens()
    small = tiny_build(vocab=TINY_VOCAB._replace(padded=50))
    large = tiny_build(vocab=TINY_VOCAB._replace(padded=80))
    losses = [tiny_model(tiny_config(), b)(tokens, labels=tokens).total for b in (small, large)]
    torch.testing.assert_close(losses[0], losses[1], **SAME)


@pytest.mark.parametrize(
    "switch",
    [
        *("default", "alibi", "grouped queries with rope"),
        *("side by side", "norms of queries and keys", "window", "soft caps"),
    ],
)
def test_recomputation_is_bitwise_the_same_with_dropout_on(switch: str) -> None:
    config = dataclasses.replace(config_of(switch), hidden_dropout=0.3, attention_dropout=0.2)
    tokens, results = tiny_tokens(), []
    for recompute in (False, True):
        build = tiny_build(recompute=recompute)
        model = tiny_model(config, build)
        loss = model(tokens, labels=tokens).total
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for plain, again in zip(*results):
        assert torch.equal(plain, again)


def test_evaluation_drops_nothing_and_training_drops_by_sample() -> None:
    config = tiny_config(hidden_dropout=0.5, attention_dropout=0.5)
    build = tiny_build()
    model, tokens = tiny_model(config, build), tiny_tokens()
    model.eval()
    with build.streams.of(None):  # nothing is drawn
        torch.testing.assert_close(model(tokens), tiny_model(tiny_config())(tokens), rtol=0, atol=0)
    model.train()
    before = torch.get_rng_state()
    first, again = model(tokens), model(tokens)
    assert torch.equal(first, again)
    with build.streams.of(Samples(1, 1)):
        later = model(tokens[1:])
    torch.testing.assert_close(later, first[:, 1:], **SAME)
    with build.streams.of(Samples(2, 2)):
        assert not torch.equal(model(tokens), first)
    assert torch.equal(torch.get_rng_state(), before), "the default generator is another's"


def test_a_training_step_works_after_an_inference_mode_pass() -> None:
    for switch in ("rope", "alibi"):
        model, tokens = tiny_model(config_of(switch)), tiny_tokens()
        with torch.inference_mode():
            model(tokens)
        model(tokens, labels=tokens).total.backward()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("residual", [False, True])
def test_half_precision_keeps_close_to_float64(precision: str, residual: bool) -> None:
    chosen = PrecisionConfig(**{precision: True}, fp32_residual_connection=residual)
    config = tiny_config(apply_residual_connection_post_layernorm=residual, embed_layernorm=True)
    tokens = tiny_tokens()
    half = tiny_model(config, tiny_build(precision=chosen))
    loss = half(tokens, labels=tokens)
    exact = tiny_model(config)(tokens, labels=tokens)
    assert half(tokens).dtype == getattr(torch, chosen.precision.value)
    assert loss.total.dtype == torch.float32
    loss.total.backward()
    # bfloat16 has 8 bits: values of a few units in two layers come out within a few percent.
    assert loss.mean.item() == pytest.approx(exact.mean.item(), rel=0.05)


def test_document_ids_without_position_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="document ids were given without position ids"):
        gpt_carry(tiny_tokens(), None, tiny_tokens())


def test_one_state_dict_fits_both_classes() -> None:
    config = tiny_config()
    model = tiny_model(config)
    pipe = GPTModelPipe(config, tiny_build())
    stage = pipe.stage(LayerRange(0, len(pipe.specs)))
    roughen(stage, pipe.build.ctx)
    assert stage.state_dict().keys() == model.state_dict().keys()
    tokens = tiny_tokens()
    loss = pipe.loss(stage((tokens,)), tokens, torch.ones(2, 9))
    torch.testing.assert_close(loss.total, model(tokens, labels=tokens).total, rtol=0, atol=0)


@pytest.mark.parametrize("shape", MODELS)
@pytest.mark.parametrize("split", [False, True])
def test_under_sequence_parallelism_every_unsplit_weight_has_its_gradients_summed(
    shape: str, split: bool
) -> None:
    """All of a GPT but its split matrices works on the rank's own part of the sequence."""
    config = tiny_run("nowhere", **MODELS[shape]).model
    for changes in ({}, {"embed_layernorm": True, "add_qkv_bias": True}):
        build = tiny_build(second_of_two(), sequence_parallel=split)
        model = GPTModel(dataclasses.replace(config, **changes), build)
        for name, parameter in model.named_parameters():
            unsplit = partition_of(parameter) is None
            # Norms of heads are applied to the rank's own heads, which makes summands in any case.
            summed = "query_norm" in name or "key_norm" in name or split
            assert is_sequence_parallel(parameter) == (summed and unsplit), name


def test_a_split_sequence_on_one_rank_is_the_whole_one() -> None:
    config, tokens = tiny_config(embed_layernorm=True), tiny_tokens()
    whole, split = tiny_model(config), tiny_model(config, tiny_build(sequence_parallel=True))
    assert torch.equal(split(tokens), whole(tokens))


def test_token_by_token_a_split_sequence_is_refused() -> None:
    model = tiny_model(tiny_config(), tiny_build(sequence_parallel=True))
    executor = ForwardExecutor(model.eval(), ParallelContext.single(), blocks=1)
    plan = ForwardPlan((), (SequenceSlice(0, (1, 2), 0, (0,), True),))
    with pytest.raises(ConfigError, match="cannot generate token by token"):
        executor.scores(plan)


def test_a_copy_of_the_weights_is_kept_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    build = tiny_build(precision=PrecisionConfig(bf16=True))
    weights = 2 * 2 * 16 * (3 * 16 + 16 + 64 + 64) + 2 * 56 * 16  # bytes; the tied table is one
    packed: list[bool] = []

    def recorded(weights: Any, *, pack: bool) -> Any:
        packed.append(pack)
        return row_products.row_products(weights, pack=pack)

    monkeypatch.setattr(gpt_model, "row_products", recorded)
    for free, expected in ((4 * weights, True), (4 * weights - 1, False), (None, True)):
        monkeypatch.setattr(gpt_model, "free_memory_bytes", lambda free=free: free)
        model = tiny_model(tiny_config(), build)
        assert model.row_products() is not model.row_products()  # its weights may change
        model.requires_grad_(False)
        assert model.row_products() is model.row_products()
        assert packed == [False, False, expected]
        packed.clear()


class NotingPlaces:
    """Runs layers as they are, and notes their places."""

    def __init__(self) -> None:
        self.places: list[tuple[int, bool]] = []

    def run(self, at: int, module: Any, layer: Any, carry: Any, *, is_last: bool) -> Any:
        assert isinstance(module, torch.nn.Module)
        self.places.append((at, is_last))
        return layer(carry)


def test_weights_run_every_layer_at_its_place_whatever_part_is_run() -> None:
    model, tokens = tiny_model(tiny_config()).eval(), tiny_tokens()
    plain = model(tokens)
    weights = NotingPlaces()
    model.weights = weights
    assert torch.equal(model(tokens), plain)
    last = len(model.specs) - 1
    assert weights.places == [(at, at == last) for at in range(last + 1)]
    weights.places.clear()
    model.run(model.run(gpt_carry(tokens), stop=-2), start=-2)
    assert [at for at, _ in weights.places] == list(range(last + 1))


def test_a_model_whose_weights_come_and_go_keeps_no_packed_copy_of_them() -> None:
    model = tiny_model(tiny_config(), tiny_build(precision=PrecisionConfig())).eval()
    model.requires_grad_(False)
    assert all(each.packed is not None for each in model.row_products().products)
    again = tiny_model(tiny_config(), tiny_build(precision=PrecisionConfig())).eval()
    again.requires_grad_(False)
    again.weights = NotingPlaces()
    assert again.row_products().products
    assert all(each.packed is None for each in again.row_products().products)


def test_a_stage_has_no_scores_of_its_own() -> None:
    stage = GPTModel(tiny_config(), tiny_build(), layers=LayerRange(0, 2))
    assert (stage.has_embedding, stage.has_head) == (True, False)
    with pytest.raises(ConfigError, match="computes no scores of tokens by itself") as caught:
        stage(tiny_tokens())
    assert caught.value.found == "layers 0 to 1 of 5"


def test_a_stage_multiplies_by_the_embedding_only_where_it_is_the_head() -> None:
    build = tiny_build(precision=PrecisionConfig())
    first, last = (
        GPTModel(tiny_config(), build, layers=LayerRange(*layers)).requires_grad_(False)
        for layers in ((0, 2), (2, 5))
    )
    counts = [len(stage.row_products().products) for stage in (first, last)]
    assert counts == [4, 5]
