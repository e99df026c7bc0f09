"""The flags that Megatron keeps in a checkpoint's `args`, to and from our config groups.

Only flags that define the meaning of the weights and the state of the training are converted, not
those of files, machines and logging. Flags of models that are not supported are refused by name.
"""

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.files.unpickle import EnumValue
from megatron.checkpoint.t5_tensors import CONFIG_GROUP
from megatron.config.blocks import NormPlacement, QkNormScope
from megatron.config.experts import LoadBalancing, MlpType
from megatron.config.fields import from_plain, to_plain
from megatron.config.model import (
    Activation,
    GluActivation,
    ModelConfig,
    PositionEmbedding,
    RopeType,
)
from megatron.errors import CheckpointError, ConfigError
from megatron.tokenizer.tokenizer import TOKENIZER_TYPES

Groups = dict[str, dict[str, Any]]

_SAME_NAME: Mapping[str, tuple[str, ...]] = {
    "model": (
        *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels"),
        *("max_position_embeddings", "rotary_base", "rotary_percent", "layernorm_epsilon"),
        *("apply_residual_connection_post_layernorm", "embed_layernorm", "qk_layernorm", "swiglu"),
        *("glu_activation", "squared_relu", "openai_gelu", "onnx_safe", "add_bias_linear"),
        *("add_qkv_bias", "untie_embeddings_and_output_weights", "hidden_dropout"),
        *("attention_dropout", "init_method_std", "init_method_xavier_uniform"),
        *("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor"),
        "softmax_scale",
    ),
    "data": ("seq_length", "bert_binary_head"),
    "tokenizer": ("make_vocab_size_divisible_by", "vocab_extra_ids"),
    "training": ("micro_batch_size", "global_batch_size", "seed"),
    "optimizer": (
        *("optimizer", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"),
        "clip_grad",
    ),
    "schedule": ("lr", "min_lr"),
    "precision": (
        *("fp16", "bf16", "loss_scale", "initial_loss_scale", "min_loss_scale"),
        *("loss_scale_window", "hysteresis", "fp32_residual_connection"),
    ),
}
_OTHER_SPELLINGS: Mapping[str, tuple[str, str]] = {
    "norm_epsilon": ("model", "layernorm_epsilon"),
    "encoder_seq_length": ("data", "seq_length"),
    "rotary_theta": ("model", "rotary_base"),
}
# bigscience numbers its kinds of positions; it had no names for them before.
_POSITION_NUMBERS = {1: "rope", 2: "learned_absolute", 3: "alibi"}
_OF_T5 = PositionEmbedding.RELATIVE
_POSITION_NAMES = {
    "absolute": "learned_absolute",
    "rotary": "rope",
    # Megatron-LM's T5 has no relative ones.
    **{kind.value: kind.value for kind in PositionEmbedding if kind is not _OF_T5},
}
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
# Flags of experts, in layouts that hold them.
_EXPERTS = (
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_gate"),
    *("moe_shared_expert_intermediate_size", "moe_router_pre_softmax"),
    *("moe_router_score_function", "moe_router_topk_scaling_factor", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
    *("moe_expert_capacity_factor", "moe_token_drop_policy", "moe_z_loss_coeff"),
)
# Flags that change the meaning of the weights in ways that our models do not support.
_REFUSED = (
    *("multi_latent_attention", "apply_layernorm_1p", "rotary_interleaved"),
    *("quick_geglu", "glu_linear_offset", "activation_func_clamp_value"),
    *("window_size", "heterogeneous_layers_config_path", "is_hybrid_model"),
)


def decoder_of_args(args: Mapping[str, Any], *, layers: int) -> dict[str, Any]:
    """Return the fields of `EncoderDecoderConfig` that the `args` of a T5 define.

    Args:
        layers: of the decoder, as many as the files hold: `args` need not say it.
    """
    length = args.get("decoder_seq_length")
    fields = {"decoder_num_layers": args.get("decoder_num_layers") or layers}
    return fields if length is None else {**fields, "decoder_seq_length": length}


def config_of_args(args: Mapping[str, Any], *, experts: bool = False) -> Groups:
    """Return the fields of our config groups (plain values) that Megatron's `args` define.

    Args:
        experts: whether the layout of the files holds models with experts.

    Raises:
        CheckpointError: the flags describe a model that is not supported.
    """
    given = {name: value for name, value in args.items() if value is not None}
    if given.get("num_experts") in (1, [1]):  # microsoft's fork records this for a dense model
        del given["num_experts"]
    _refuse(given, experts=experts)
    groups: Groups = {group: {} for group in _SAME_NAME}
    for spelling, (group, field) in _OTHER_SPELLINGS.items():
        if spelling in given:
            groups[group][field] = given[spelling]
    for group, names in _SAME_NAME.items():
        groups[group] |= {name: given[name] for name in names if name in given}
    model = groups["model"]
    model["position_embedding_type"] = _positions(given)
    if "normalization" in given:
        kind = str(given["normalization"])
        model["normalization"] = _NORMS.get(kind.lower(), kind)
    groups_ = _query_groups(given)
    if groups_ is not None:
        model["num_query_groups"] = groups_
    if given.get("no_rope_freq"):
        model["no_rope_freq"] = str(given["no_rope_freq"])  # N, or a list
    if given.get("bias_gelu_fusion") is False and not _has_another_activation(model):
        model["onnx_safe"] = True  # without the fused kernel Megatron computes the exact GELU
    if given.get("num_experts"):
        model |= _experts(given)
    if given.get("tokenizer_type") in TOKENIZER_TYPES:
        groups["tokenizer"] |= _tokenizer(given)
    length = "train_samples" if given.get("train_samples") else "train_iters"
    if length in given:
        groups["training"][length] = given[length]
    return {group: values for group, values in groups.items() if values}


def args_of_config(
    config: Mapping[str, Mapping[str, Any]], *, experts: bool = False
) -> dict[str, Any]:
    """Return Megatron's flat flags for our config groups (plain values), in plain types.

    Args:
        experts: whether the layout of the files holds models with experts.

    Raises:
        CheckpointError: Megatron has no flags for this model.
    """
    groups = {name: dict(values) for name, values in config.items()}
    try:
        model = from_plain(ModelConfig, groups.get("model", {}))
    except ConfigError as error:
        raise CheckpointError(
            "the checkpoint does not say which model it is of",
            found=f"{error.problem}; {error.found}",
            fix="convert from a format that stores the flags of its model",
        ) from error
    _refuse_ours(model, experts=experts)
    args: dict[str, Any] = {
        name: groups[group][name]
        for group, names in _SAME_NAME.items()
        for name in names
        if name in groups.get(group, {})
    }
    seq_length = args.get("seq_length")
    positions, without = model.position_embedding_type, model.layers_without_rotation
    is_tanh = model.activation is Activation.GELU_TANH
    length = groups.get("training", {})
    args |= {
        "ffn_hidden_size": model.ffn_width,
        "kv_channels": model.head_width,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "max_position_embeddings": model.max_position_embeddings or seq_length,
        "encoder_seq_length": seq_length,
        "position_embedding_type": positions.value,
        "add_position_embedding": positions is PositionEmbedding.LEARNED,
        "use_rotary_position_embeddings": positions is PositionEmbedding.ROPE,
        "no_rope_freq": [int(at in without) for at in range(model.num_layers)] if without else None,
        "normalization": model.normalization.value,
        "norm_epsilon": model.layernorm_epsilon,
        # Megatron leaves the fused kernel, and with it the tanh form, where there are no biases.
        "bias_gelu_fusion": is_tanh and model.add_bias_linear and not model.openai_gelu,
        "openai_gelu": model.openai_gelu or (is_tanh and not model.add_bias_linear),
        "encoder_num_layers": model.num_layers,
        **_decoder_args(groups.get(CONFIG_GROUP, {}), model),
        "train_iters": length.get("train_iters"),
        "train_samples": length.get("train_samples"),
        **_tokenizer(groups.get("tokenizer", {})),
        **(_expert_args(model) if model.has_experts else {}),
    }
    return args


def _decoder_args(fields: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's flags of a decoder; none where the model has none of its own."""
    if fields.get("decoder_num_layers") is None:
        return {}
    return {
        "decoder_num_layers": fields["decoder_num_layers"] or model.num_layers,
        "decoder_seq_length": fields.get("decoder_seq_length"),
    }


def _experts(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return our fields about experts; a loss without a weight balances nothing."""
    fields = {name: given[name] for name in _EXPERTS if name in given}
    fields["moe_layer_freq"] = str(given.get("moe_layer_freq", 1))  # N, or a list
    kind, weight = given.get("moe_router_load_balancing_type"), given.get("moe_aux_loss_coeff")
    if kind == LoadBalancing.SINKHORN:
        fields["moe_router_load_balancing_type"] = kind
    elif kind is not None and weight:
        fields |= {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": weight}
    if not given.get("moe_router_enable_expert_bias"):
        fields.pop("moe_router_bias_update_rate", None)
    return fields


def _expert_args(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's flags of experts, in plain types."""
    plain = to_plain(model)
    layers = [int(has_experts) for has_experts in model.expert_layers]
    return {
        **{name: plain[name] for name in _EXPERTS},
        "moe_ffn_hidden_size": model.expert_width,
        "moe_layer_freq": 1 if all(layers) else layers,
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type.value,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
    }


def _refuse(given: Mapping[str, Any], *, experts: bool) -> None:
    refused = _REFUSED if experts else ("num_experts", *_REFUSED)
    found = [f"{name}={given[name]!r}" for name in refused if given.get(name)]
    if given.get("softmax_type") not in (None, "vanilla"):
        found.append(f"softmax_type={given['softmax_type']!r}")
    if found:
        raise CheckpointError(
            "the checkpoint is of a kind of Megatron model that this program does not have",
            found=", ".join(found),
            fix="use the program that trained it",
        )


def flags_without_core(model: ModelConfig) -> list[str]:
    """Return the flags of a model that forks of Megatron have, and Megatron core does not."""
    found = []
    if model.glu_activation is not None and not model.swiglu:
        found.append(f"--glu-activation {model.glu_activation}")
    if model.position_embedding_type is PositionEmbedding.ALIBI:
        found.append("--position-embedding-type alibi")
    if model.embed_layernorm:
        found.append("--embed-layernorm")
    return found


def refuse_without_core(config: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise CheckpointError if Megatron core has no model of these config groups."""
    if found := flags_without_core(from_plain(ModelConfig, config.get("model", {}))):
        raise CheckpointError(
            "Megatron core has no model like this one, so it would compute something else",
            found=", ".join(found),
            fix="write another format: megatron with --megatron-names legacy, sharded or "
            "huggingface",
        )


def _refuse_ours(model: ModelConfig, *, experts: bool) -> None:
    if model.has_experts and not experts:
        raise CheckpointError(
            "experts are not written in Megatron's format here",
            found=f"--num-experts {model.num_experts}",
            fix="write another format: torch_dist, sharded or huggingface",
        )
    found = [
        flag
        for flag, on in (
            ("--use-parallel-residual", model.use_parallel_residual),
            (f"--position-embedding-type {_OF_T5}", model.position_embedding_type is _OF_T5),
            ("--sliding-window", model.sliding_window is not None),
            ("--softmax-type", model.has_sinks),
            ("--norm-placement", model.norm_placement is not NormPlacement.BEFORE),
            ("--qk-layernorm-scope", model.qk_layernorm_scope is not QkNormScope.HEAD),
            ("--embedding-multiplier", model.embedding_multiplier != 1.0),
            ("--residual-multiplier", model.residual_multiplier != 1.0),
            ("--logit-divisor", model.logit_divisor != 1.0),
            ("--attention-soft-cap", model.attention_soft_cap is not None),
            ("--logit-soft-cap", model.logit_soft_cap is not None),
            ("--window-rotary-base", model.window_rotary_base is not None),
            ("--glu-activation geglu_tanh", model.glu is GluActivation.GEGLU_TANH),
            ("--relu", model.relu),
            ("--use-mup", model.use_mup),
            ("--rope-type yarn", model.rope_type is not RopeType.ROPE),
            ("--mlp-type residual", model.mlp_type is MlpType.RESIDUAL),
            ("--moe-router-add-bias", model.moe_router_add_bias),
            ("--quick-geglu", model.activation is Activation.GELU_SIGMOID),
            ("--glu-linear-offset or --activation-func-clamp-value", not model.has_plain_unit),
        )
        if on
    ]
    if found:
        raise CheckpointError(
            "Megatron has no model like this one, so it would compute something else",
            found=", ".join(found),
            fix="write another format: sharded or huggingface",
        )


def _positions(given: Mapping[str, Any]) -> str:
    kind = given.get("position_embedding_type", "learned_absolute")
    if given.get("use_rotary_position_embeddings"):
        return "rope"
    if isinstance(kind, EnumValue):
        name = _POSITION_NUMBERS.get(kind.value)
    else:
        name = _POSITION_NAMES.get(str(kind))
    if name is None:
        raise CheckpointError(
            "the checkpoint's model has positions of a kind that this program does not know",
            found=f"position_embedding_type={kind!r}",
            fix=f"use the program that trained it; known are {', '.join(_POSITION_NAMES)}",
        )
    if name == "learned_absolute" and given.get("add_position_embedding") is False:
        return "none"
    return name


def _query_groups(given: Mapping[str, Any]) -> int | None:
    if given.get("group_query_attention"):
        return int(given["num_query_groups"])
    groups = given.get("num_key_value_heads")  # microsoft's fork
    return None if groups in (None, given.get("num_attention_heads")) else int(groups)


def _has_another_activation(model: Mapping[str, Any]) -> bool:
    return any(
        model.get(name) for name in ("swiglu", "glu_activation", "squared_relu", "openai_gelu")
    )


def _tokenizer(given: Mapping[str, Any]) -> dict[str, Any]:
    fields = ["tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "vocab_size"]
    if given.get("tokenizer_type") == "TikTokenizer":  # the others have these flags' defaults
        fields += ["tiktoken_pattern", "tiktoken_num_special_tokens"]
    return {name: given[name] for name in fields if given.get(name) is not None}
