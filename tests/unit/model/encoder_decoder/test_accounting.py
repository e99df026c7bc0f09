"""Counts from the config equal counts of the thing itself."""

from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.activations import ActivationPolicy, RecomputeMethod, RecomputeModule
from megatron.config.blocks import NormPlacement, QkNormScope
from megatron.config.model import ModelConfig, PositionEmbedding
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.config.presets import PRESETS
from megatron.model.encoder_decoder.accounting import (
    flops_per_encoder_token,
    t5_parameter_count,
)
from tests.support.models import TINY_VOCAB, tiny_build
from tests.support.t5.models import T5_1_0, T5_1_1, TINY_DECODER, tiny_rows, tiny_t5

MODELS: dict[str, dict[str, Any]] = {
    "megatron": {},
    "1.0": T5_1_0,
    "1.1": T5_1_1,
    "norms of heads, groups": {"qk_layernorm": True, "num_query_groups": 2},
    "norms of all heads, after branches": {
        "qk_layernorm": True,
        "qk_layernorm_scope": QkNormScope.ALL_HEADS,
        "norm_placement": NormPlacement.AFTER,
        "position_embedding_type": PositionEmbedding.ALIBI,
        "add_bias_linear": False,
        "add_qkv_bias": True,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model(name: str) -> None:
    model = tiny_t5(**MODELS[name])
    expected = sum(parameter.numel() for parameter in model.parameters())
    found = t5_parameter_count(model.config, TINY_DECODER, TINY_VOCAB.padded, 12)
    assert found == expected


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("t5-small", 60_506_624),
        ("t5-base", 222_903_552),
        ("t5-large", 737_668_096),
        ("t5-1.1-small", 76_961_152),
        ("t5-1.1-base", 247_577_856),
        ("t5-1.1-large", 783_150_080),
    ],
)
def test_published_models_have_their_published_size(name: str, published: int) -> None:
    """Sizes of the released checkpoints, whose vocabulary has 32,128 rows."""
    fields = {field: PRESETS[name][field] for field in PRESETS[name] if field != "seq_length"}
    as_deep = EncoderDecoderConfig(decoder_num_layers=0)
    assert t5_parameter_count(ModelConfig(**fields), as_deep, 32128, 512) == published


RECOMPUTED = {
    "nothing": ActivationPolicy(),
    "all": ActivationPolicy(method=RecomputeMethod.UNIFORM),
    "one layer": ActivationPolicy(method=RecomputeMethod.BLOCK),
    "attention": ActivationPolicy(modules=frozenset({RecomputeModule.CORE_ATTN})),
    "mlp": ActivationPolicy(modules=frozenset({RecomputeModule.MLP})),
}


@pytest.mark.parametrize("name", ["megatron", "1.1", "norms of heads, groups"])
@pytest.mark.parametrize("recomputed", RECOMPUTED)
def test_flops_are_those_that_torch_counts(name: str, recomputed: str) -> None:
    policy = RECOMPUTED[recomputed]
    model = tiny_t5(tiny_build(activations=policy), **MODELS[name])
    tokens, padding, answers = tiny_rows()
    # The fused CPU kernel has no entry in torch's table; the plain one counts the same products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, padding, answers, answers).total.backward()
    config, (source, target) = model.config, (tokens.shape[1], answers.shape[1])
    found = flops_per_encoder_token(
        config,
        3,
        vocab_padded=TINY_VOCAB.padded,
        lengths=(source, target),
        recompute=policy,
    )
    # PyTorch stops recomputing once it has all it needs: not fc2, nor probabilities times v.
    fc2 = 2 * config.ffn_width * config.hidden_size
    values = 2 * config.num_attention_heads * config.head_width
    both = 2 * source + 3 * target
    spared = {
        "nothing": 0,
        "all": fc2 * both,
        "one layer": fc2 * source,
        "mlp": fc2 * both,
        "attention": values * (2 * source**2 + 3 * target * (target + source)),
    }[recomputed]
    rows = len(tokens)
    expected = (counter.get_total_flops() + rows * spared) / (rows * source)
    assert abs(found.hardware - expected) <= 1.0  # each of two summands is rounded
    assert found.model < found.hardware or recomputed == "nothing"


def test_the_causal_half_of_the_decoder_alone_is_left_out() -> None:
    config = tiny_t5().config
    lengths = (12, 12)
    found = flops_per_encoder_token(config, 2, vocab_padded=0, lengths=lengths)
    scores = 4 * config.hidden_size  # of a query and a key, forward
    assert found.model - found.causal == 3 * 2 * scores * (12 * 12 - 12 * 13 // 2) // 12


def test_more_tokens_of_the_decoder_cost_more() -> None:
    config = tiny_t5().config
    short, long = (
        flops_per_encoder_token(config, 2, vocab_padded=56, lengths=(12, n)).model for n in (6, 12)
    )
    assert short < long < 2 * short
