"""Every family has a place for every tensor that the models it holds can have."""

import dataclasses

import pytest

from megatron.checkpoint.bert_tensors import BertHeads
from megatron.checkpoint.formats.huggingface.families.registry import FAMILIES
from megatron.checkpoint.formats.huggingface.family import Sizes
from megatron.config.blocks import NormPlacement, QkNormScope
from megatron.config.model import GluActivation, Normalization, PositionEmbedding, SoftmaxType
from megatron.config.models.vision import VisionConfig
from tests.support.models import tiny_config
from tests.support.t5.models import T5_1_0, T5_1_1, TINY_DECODER

LLAMA = {
    "position_embedding_type": PositionEmbedding.ROPE,
    "normalization": Normalization.RMS_NORM,
    "swiglu": True,
    "add_bias_linear": False,
}
OLMO2 = {
    **LLAMA,
    "norm_placement": NormPlacement.AFTER,
    "qk_layernorm": True,
    "qk_layernorm_scope": QkNormScope.ALL_HEADS,
}
GPT_OSS = {
    **{name: value for name, value in LLAMA.items() if name != "swiglu"},
    "glu_activation": GluActivation.QUICK_GEGLU,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
    "softmax_type": SoftmaxType.LEARNABLE,
    "add_bias_linear": True,
    "num_experts": 3,
    "moe_router_add_bias": True,
}
GEMMA = {
    **{name: value for name, value in LLAMA.items() if name != "swiglu"},
    "glu_activation": GluActivation.GEGLU_TANH,
    "norm_placement": NormPlacement.BOTH,
    "embedding_multiplier": 4.0,
    "softmax_scale": 8**-0.5,
}
BLOOM = {"position_embedding_type": PositionEmbedding.ALIBI, "embed_layernorm": True}
FALCON = {"position_embedding_type": PositionEmbedding.ROPE, "use_parallel_residual": True}
HELD = {
    "gpt2": [{}, {"untie_embeddings_and_output_weights": True}, {"onnx_safe": True}],
    "gpt_neox": [
        {"position_embedding_type": PositionEmbedding.ROPE, "use_parallel_residual": parallel}
        for parallel in (False, True)
    ],
    "bloom": [
        {**BLOOM, "apply_residual_connection_post_layernorm": after} for after in (False, True)
    ],
    "falcon": [
        {**FALCON, "add_bias_linear": False},
        {**FALCON, "num_query_groups": 2, "onnx_safe": True},
    ],
    "llama": [LLAMA, {**LLAMA, "add_bias_linear": True, "num_query_groups": 2, "kv_channels": 6}],
    "mistral": [LLAMA, {**LLAMA, "sliding_window": 4}],
    "phi3": [
        LLAMA,
        {**LLAMA, "rotary_percent": 0.5, "sliding_window": 4, "num_query_groups": 2},
    ],
    "qwen2": [{**LLAMA, "add_qkv_bias": True, "sliding_window": 4}],
    "qwen3": [{**LLAMA, "qk_layernorm": True, "kv_channels": 6}],
    "smollm3": [LLAMA, {**LLAMA, "no_rope_freq": "2"}],
    "olmo2": [{**OLMO2, "num_query_groups": 2, "kv_channels": 6}, OLMO2],
    "granite": [
        LLAMA,
        {
            **LLAMA,
            "add_bias_linear": True,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "softmax_scale": 0.01,
            "logit_divisor": 8.0,
        },
    ],
    "opt": [{"relu": True}, {"relu": True, "add_bias_linear": False}],
    "mixtral": [
        {**LLAMA, "num_experts": 3},
        {**LLAMA, "num_experts": 2, "sliding_window": 4, "kv_channels": 6},
    ],
    "gpt_oss": [GPT_OSS, {**GPT_OSS, "sliding_window": 4, "window_attn_skip_freq": "2"}],
    "gemma2": [{**GEMMA, "attention_soft_cap": 50.0, "logit_soft_cap": 30.0}, GEMMA],
    "gemma3_text": [
        {**GEMMA, "qk_layernorm": True, "logit_soft_cap": 30.0},
        {**GEMMA, "qk_layernorm": True, "sliding_window": 4, "window_rotary_base": 50.0},
    ],
    "qwen2_moe": [
        {
            **LLAMA,
            "add_qkv_bias": True,
            "num_experts": 3,
            "moe_router_pre_softmax": pre_softmax,
            "moe_shared_expert_intermediate_size": 12,
            "moe_shared_expert_gate": True,
        }
        for pre_softmax in (False, True)
    ],
    "qwen3_moe": [{**LLAMA, "qk_layernorm": True, "kv_channels": 6, "num_experts": 3}],
    "vit": [{}],
    "bert": [
        {"apply_residual_connection_post_layernorm": True, "onnx_safe": True},
        {"apply_residual_connection_post_layernorm": True},
    ],
    "megatron-bert": [{"onnx_safe": True}, {}],
    "t5": [T5_1_0, T5_1_1],
}


def heads_for(name: str) -> BertHeads | None:
    return BertHeads() if "bert" in name else None


def sizes_for(name: str) -> Sizes:
    return Sizes(
        50,
        12,
        heads_for(name),
        decoder=TINY_DECODER if name == "t5" else None,
        vision=VisionConfig() if name == "vit" else None,
    )


def test_experts_are_held_by_families_that_have_them() -> None:
    dense, several = tiny_config(**LLAMA), tiny_config(**LLAMA, num_experts=4)
    assert list(FAMILIES["llama"].lacks(several)) == [
        "--num-experts 4 (llama has one MLP in a layer)"
    ]
    assert list(FAMILIES["mixtral"].lacks(dense)) == ["--num-experts None (mixtral has experts)"]
    # One expert is a dense model.
    assert list(FAMILIES["llama"].lacks(tiny_config(**LLAMA, num_experts=1))) == []
    some = dataclasses.replace(several, moe_layer_freq="[1,0]")
    assert list(FAMILIES["mixtral"].lacks(some)) == [
        "layer 1 without experts (mixtral has them in every layer)"
    ]
    assert list(FAMILIES["qwen3_moe"].lacks(dataclasses.replace(some, qk_layernorm=True))) == []
    shared = dataclasses.replace(several, moe_shared_expert_intermediate_size=8)
    assert list(FAMILIES["mixtral"].lacks(shared)) == [
        "--moe-shared-expert-intermediate-size 8 (mixtral has None)"
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_has_a_rule_and_every_key_is_used_once(name: str) -> None:
    family = FAMILIES[name]
    for changes in HELD[name]:
        config = tiny_config(**changes)
        assert list(family.lacks(config)) == []
        keys: list[str] = []
        for ours in family.tensors_of(config, sizes_for(name)):
            keys += family.rule(ours, config)[1]
        assert len(keys) == len(set(keys))
        in_layer = ".block.{}." if name == "t5" else ".{}."
        of_layers = [key for key in keys if "relative_attention_bias" not in key]
        first, second = ([k for k in of_layers if in_layer.format(at) in k] for at in (0, 1))
        assert len(second) == len(first) > 5
        assert all(key.startswith(family.prefix) or family.is_above(key) for key in keys)
        assert not any(family.is_buffer(key) for key in keys)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_lacks_is_spelled_as_a_flag(name: str) -> None:
    family, config = FAMILIES[name], tiny_config(**HELD[name][0])
    is_both = config.norm_placement is NormPlacement.BOTH
    other = NormPlacement.BEFORE if is_both else NormPlacement.BOTH
    changes = [
        ({"embed_layernorm": not config.embed_layernorm}, "--embed-layernorm "),
        ({"position_embedding_type": PositionEmbedding.NONE}, "--position-embedding-type none"),
        ({"norm_placement": other}, f"--norm-placement {other}"),
    ]
    if "logit_divisor" not in family.free:
        changes.append(({"logit_divisor": 2.0}, "--logit-divisor 2.0"))
    after = "apply_residual_connection_post_layernorm"
    is_before = config.norm_placement is NormPlacement.BEFORE
    if after in family.supported and is_before and not config.use_parallel_residual:
        changes.append(({after: not getattr(config, after)}, "--apply-residual-connection"))
    for change, message in changes:
        lacking = list(family.lacks(dataclasses.replace(config, **change)))
        assert any(text.startswith(message) for text in lacking)


def test_a_gated_unit_without_a_bound_is_not_that_of_gpt_oss() -> None:
    config = tiny_config(**GPT_OSS | {"activation_func_clamp_value": None})
    assert list(FAMILIES["gpt_oss"].lacks(config)) == [
        "bounds of a gated unit False (gpt_oss has True)"
    ]


def test_what_follows_from_other_flags_is_as_the_family_has_it() -> None:
    for changes, message in (
        ({"embedding_multiplier": 3.0}, "--embedding-multiplier 3.0 (gemma3_text has 4.0)"),
        ({"softmax_scale": 0.3}, "--softmax-scale 0.3 (gemma3_text has 0.30151134457776363)"),
        (
            {"sliding_window": 4},
            "--window-rotary-base None (gemma3_text has 10000.0)",
        ),
    ):
        config = tiny_config(**GEMMA | {"qk_layernorm": True} | changes)
        assert list(FAMILIES["gemma3_text"].lacks(config)) == [message]


def test_families_of_plain_heads_say_so() -> None:
    wide = tiny_config(kv_channels=6)
    assert list(FAMILIES["gpt2"].lacks(wide)) == ["--kv-channels 6 (gpt2 has 4)"]
    assert list(FAMILIES["llama"].lacks(tiny_config(**LLAMA, no_rope_freq="2"))) == [
        "layers without rotation (1,) (llama has ())"
    ]
    narrow = tiny_config(**BLOOM, ffn_hidden_size=20)
    assert list(FAMILIES["bloom"].lacks(narrow)) == ["--ffn-hidden-size 20 (bloom has 64)"]
    grouped = tiny_config(num_query_groups=2)
    assert list(FAMILIES["gpt2"].lacks(grouped)) == ["--num-query-groups 2 (gpt2 has 4)"]
