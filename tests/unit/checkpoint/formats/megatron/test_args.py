"""Flags in Megatron's `args` become ours with their meaning, and back; others are refused."""

from typing import Any

import pytest

from megatron.checkpoint.files.unpickle import EnumValue
from megatron.checkpoint.formats.megatron.args import args_of_config, config_of_args
from megatron.config.fields import from_plain
from megatron.config.model import Activation, ModelConfig
from megatron.errors import CheckpointError

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}


def _model(**args: Any) -> ModelConfig:
    return from_plain(ModelConfig, config_of_args({**SIZES, **args})["model"])


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        ({}, "learned_absolute"),
        ({"position_embedding_type": "absolute"}, "learned_absolute"),
        ({"position_embedding_type": "rope"}, "rope"),
        ({"use_rotary_position_embeddings": True}, "rope"),
        ({"position_embedding_type": "learned_absolute", "add_position_embedding": False}, "none"),
        ({"position_embedding_type": EnumValue("megatron.enums.P", 1)}, "rope"),
        ({"position_embedding_type": EnumValue("megatron.enums.P", 2)}, "learned_absolute"),
        ({"position_embedding_type": EnumValue("megatron.enums.P", 3)}, "alibi"),
    ],
)
def test_positions_of_every_spelling_are_known(args: dict[str, Any], kind: str) -> None:
    assert _model(**args).position_embedding_type.value == kind


@pytest.mark.parametrize("kind", ["relative", EnumValue("megatron.enums.P", 9)])
def test_positions_of_another_kind_are_refused(kind: Any) -> None:
    with pytest.raises(CheckpointError, match="positions of a kind that this program does not"):
        _model(position_embedding_type=kind)


def test_heads_norms_and_activations_keep_their_meaning() -> None:
    assert _model(group_query_attention=True, num_query_groups=2).query_groups == 2
    assert _model(group_query_attention=False, num_query_groups=1).query_groups == 4
    assert _model(num_key_value_heads=2).query_groups == 2
    assert _model(num_key_value_heads=4).query_groups == 4
    assert _model(normalization="rmsnorm").normalization.value == "RMSNorm"
    assert _model(norm_epsilon=1e-6).layernorm_epsilon == 1e-6
    assert _model().activation is Activation.GELU_TANH
    assert _model(bias_gelu_fusion=True).activation is Activation.GELU_TANH
    assert _model(bias_gelu_fusion=False).activation is Activation.GELU_ERF
    assert _model(bias_gelu_fusion=False, squared_relu=True).activation is Activation.SQUARED_RELU
    without = _model(bias_gelu_fusion=False, add_bias_linear=False)
    assert without.activation is Activation.GELU_ERF


@pytest.mark.parametrize(
    "args", [{"num_experts": 8}, {"apply_layernorm_1p": True}, {"rotary_interleaved": True}]
)
def test_models_that_ours_cannot_be_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="a kind of Megatron model") as caught:
        config_of_args({**SIZES, **args})
    assert next(iter(args)) in str(caught.value.found)


@pytest.mark.parametrize("one", [1, [1]])
def test_one_expert_is_a_dense_model(one: object) -> None:
    assert "num_experts" not in config_of_args({**SIZES, "num_experts": one})["model"]
    with pytest.raises(CheckpointError, match="a kind of Megatron model"):
        config_of_args({**SIZES, "num_experts": [1, 4]})


def test_experts_are_not_written() -> None:
    flags = {"num_experts": 4, "add_bias_linear": False}
    with pytest.raises(CheckpointError, match="experts are not written in Megatron's format"):
        args_of_config({"model": {**SIZES, **flags}})


def test_lengths_tokenizers_and_numbers_of_the_training_cross_over() -> None:
    groups = config_of_args(
        {
            **SIZES,
            "encoder_seq_length": 32,
            "tokenizer_type": "GPT2BPETokenizer",
            "vocab_file": "vocab.json",
            "train_samples": 100,
            "train_iters": 25,
            "adam_beta2": 0.95,
            "bf16": True,
            "save": "/somewhere",
        }
    )
    assert groups["data"] == {"seq_length": 32}
    assert groups["tokenizer"]["vocab_file"] == "vocab.json"
    assert groups["training"] == {"train_samples": 100}
    assert groups["optimizer"] == {"adam_beta2": 0.95}
    assert groups["precision"] == {"bf16": True}
    assert "checkpoint" not in groups
    odd = config_of_args({**SIZES, "tokenizer_type": "MultimodalTokenizer"})
    assert "tokenizer" not in odd
    ranks = {"tiktoken_pattern": "v2", "tiktoken_num_special_tokens": 500}
    for kind, more in (("TikTokenizer", ranks), ("NullTokenizer", {})):
        read = config_of_args({**SIZES, "tokenizer_type": kind, **ranks})
        assert read["tokenizer"] == {"tokenizer_type": kind, **more}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"swiglu": True, "num_query_groups": 2, "normalization": "RMSNorm"},
        {"glu_activation": "geglu", "add_bias_linear": False},
        {"onnx_safe": True, "untie_embeddings_and_output_weights": True},
        {"openai_gelu": True, "kv_channels": 8},
        {"add_bias_linear": False},
        {"add_bias_linear": False, "onnx_safe": True},
        {"position_embedding_type": "rope", "rotary_percent": 0.5, "rotary_base": 5e5},
        {"position_embedding_type": "rope", "no_rope_freq": "2"},
        {"position_embedding_type": "alibi", "embed_layernorm": True},
        {"position_embedding_type": "none", "ffn_hidden_size": 24},
    ],
)
def test_flags_of_ours_come_back_with_the_same_meaning(flags: dict[str, Any]) -> None:
    ours = {"model": {**SIZES, **flags}, "data": {"seq_length": 12}}
    args = args_of_config(ours)
    assert args["ffn_hidden_size"] > 0
    back = config_of_args(args)
    meant, found = (from_plain(ModelConfig, one["model"]).meaning() for one in (ours, back))
    meant["max_position_embeddings"] = found["max_position_embeddings"]  # given explicitly there
    assert found == meant
    assert back["data"]["seq_length"] == 12


def test_the_tanh_form_without_biases_is_named_to_megatron() -> None:
    """It uses the exact form wherever linear layers have no biases, unless a flag decides."""
    plain = args_of_config({"model": SIZES})
    assert (plain["bias_gelu_fusion"], plain["openai_gelu"]) == (True, False)
    without = args_of_config({"model": {**SIZES, "add_bias_linear": False}})
    assert (without["bias_gelu_fusion"], without["openai_gelu"]) == (False, True)


@pytest.mark.parametrize(
    "flags",
    [
        {"use_parallel_residual": True},
        {"sliding_window": 4},
        {"softmax_type": "off-by-one"},
        {"glu_activation": "quick_geglu"},
        {"swiglu": True, "glu_linear_offset": 1.0},
        {"norm_placement": "after"},
        {"relu": True},
        {"attention_soft_cap": 50.0},
        {"logit_soft_cap": 30.0},
        {"glu_activation": "geglu_tanh"},
        {"position_embedding_type": "rope", "rope_type": "yarn"},
        {"qk_layernorm": True, "qk_layernorm_scope": "all-heads"},
        {"embedding_multiplier": 2.0},
        {"residual_multiplier": 2.0},
        {"logit_divisor": 2.0},
    ],
)
def test_models_that_megatron_does_not_have_are_not_written(flags: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="Megatron has no model like this one"):
        args_of_config({"model": {**SIZES, **flags}})


def test_sinks_and_the_unit_of_gpt_oss_are_refused() -> None:
    args = args_of_config({"model": SIZES})
    assert config_of_args({**args, "softmax_type": "vanilla"}) == config_of_args(args)
    for name, value in (("softmax_type", "learnable"), ("quick_geglu", True)):
        with pytest.raises(CheckpointError, match=f"{name}={value!r}"):
            config_of_args({**args, name: value})


def test_a_config_without_a_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="does not say which model it is of"):
        args_of_config({})


_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "add_bias_linear": False,
}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"moe_layer_freq": "2", "num_layers": 4},
        {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True},
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01},
        {"moe_router_load_balancing_type": "sinkhorn"},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
        {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    ],
)
def test_flags_of_experts_go_there_and_back(flags: dict[str, Any]) -> None:
    model = from_plain(ModelConfig, {**SIZES, **_EXPERTS, **flags})
    plain = {**SIZES, **_EXPERTS, **flags}
    args = args_of_config({"model": plain}, experts=True)
    layers = [int(has) for has in model.expert_layers]
    assert args["moe_layer_freq"] == (1 if all(layers) else layers)
    back = from_plain(ModelConfig, config_of_args(args, experts=True)["model"])
    assert back.expert_layers == model.expert_layers
    for name in (*_EXPERTS, *flags):
        if name != "moe_layer_freq":
            assert getattr(back, name) == getattr(model, name), name


def test_a_balance_loss_without_a_weight_is_none() -> None:
    args = {
        **{**SIZES, **_EXPERTS},
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.5,
    }
    model = from_plain(ModelConfig, config_of_args(args, experts=True)["model"])
    assert model.moe_router_load_balancing_type.value == "none"


def test_an_mlp_beside_experts_is_not_written() -> None:
    flags = {**SIZES, **_EXPERTS, "mlp_type": "residual"}
    with pytest.raises(CheckpointError, match="Megatron has no model like this one") as error:
        args_of_config({"model": flags}, experts=True)
    assert "--mlp-type residual" in str(error.value.found)
