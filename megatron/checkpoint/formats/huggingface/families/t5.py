"""T5 (arXiv 1910.10683) and T5 1.1, of which FLAN-T5 is one: encoder, decoder, relative biases.

What a reader would get wrong: 1.0 ties the head to the embedding and divides its input by
sqrt(hidden size), 1.1 does neither, and the two go together in transformers. Since release 5 it
writes 'tie_word_embeddings' as true for both, and says in 'scale_decoder_outputs' which one it is.
"""

import math

from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.checkpoint.formats.huggingface.layouts import (
    KvApart,
    OneOrStacked,
    QkvApart,
    Same,
    TensorRule,
)
from megatron.checkpoint.gpt_tensors import WORD_TABLE
from megatron.checkpoint.model_kind import T5 as T5_KIND
from megatron.config.blocks import NormPlacement
from megatron.config.model import (
    Activation,
    GluActivation,
    ModelConfig,
    Normalization,
    PositionEmbedding,
)
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.json_values import JsonValue

# 'feed_forward_proj' to our flags, and to 'dense_act_fn', which follows from it.
_UNITS: dict[str, tuple[dict[str, object], str]] = {
    "relu": ({"relu": True}, "relu"),
    "gelu": ({"onnx_safe": True}, "gelu"),
    "gelu_new": ({}, "gelu_new"),
    "gated-gelu": ({"glu_activation": "geglu_tanh"}, "gelu_new"),
    "gated-gelu_new": ({"glu_activation": "geglu_tanh"}, "gelu_new"),
    "gated-relu": ({"glu_activation": "reglu"}, "relu"),
    "gated-silu": ({"swiglu": True}, "silu"),
}
_PLAIN_NAMES = {
    Activation.RELU: "relu",
    Activation.GELU_ERF: "gelu",
    Activation.GELU_TANH: "gelu_new",
}
_GATED_NAMES = {
    GluActivation.GEGLU_TANH: "gated-gelu",
    GluActivation.REGLU: "gated-relu",
    GluActivation.SWIGLU: "gated-silu",
}
_POSITIONS = 512  # the length that T5 was pretrained with, where config.json has none


def _read(fields: Fields) -> dict[str, object]:
    unit, act = fields.choice("feed_forward_proj", _UNITS, "relu")
    fields.must_be("dense_act_fn", act, act, why="another function than 'feed_forward_proj' names")
    gated = "glu_activation" in unit or "swiglu" in unit
    fields.must_be(
        "is_gated_act", gated, gated, why="a unit that 'feed_forward_proj' does not name"
    )
    start = fields.get("pad_token_id", 0)
    fields.must_be("decoder_start_token_id", start, start, why="rows that begin with another token")
    fields.get("initializer_factor", None)
    # False is of 1.1, in config.json of all releases before 5.
    scales = fields.boolean("tie_word_embeddings", True)
    scales = fields.boolean("scale_decoder_outputs", scales)
    hidden, heads = fields.integer("d_model"), fields.integer("num_heads")
    width, dropout = fields.integer("d_kv"), fields.number("dropout_rate", 0.1)
    return {
        "num_layers": fields.integer("num_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "kv_channels": None if width * heads == hidden else width,
        "ffn_hidden_size": fields.integer("d_ff"),
        "position_embedding_type": "relative",
        "normalization": "RMSNorm",
        "layernorm_epsilon": fields.number("layer_norm_epsilon", 1e-6),
        "softmax_scale": 1.0,
        "logit_divisor": math.sqrt(hidden) if scales else 1.0,
        "untie_embeddings_and_output_weights": not scales,
        "add_bias_linear": False,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        **unit,
    }


def _sizes(fields: Fields) -> Sizes:
    decoder = EncoderDecoderConfig(
        decoder_num_layers=fields.integer("num_decoder_layers", fields.integer("num_layers")),
        relative_attention_num_buckets=fields.integer("relative_attention_num_buckets", 32),
        relative_attention_max_distance=fields.integer("relative_attention_max_distance", 128),
    )
    return Sizes(
        fields.integer("vocab_size"), fields.integer("n_positions", _POSITIONS), decoder=decoder
    )


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    decoder = sizes.decoder
    assert decoder is not None  # noqa: S101  # invariant: models of this kind have one
    return {
        "is_encoder_decoder": True,
        "d_model": config.hidden_size,
        "d_kv": config.head_width,
        "d_ff": config.ffn_width,
        "num_heads": config.num_attention_heads,
        "num_layers": config.num_layers,
        "num_decoder_layers": decoder.decoder_layers(config.num_layers),
        "relative_attention_num_buckets": decoder.relative_attention_num_buckets,
        "relative_attention_max_distance": decoder.relative_attention_max_distance,
        "feed_forward_proj": _PLAIN_NAMES[config.activation]
        if config.glu is None
        else _GATED_NAMES[config.glu],
        "layer_norm_epsilon": config.layernorm_epsilon,
        "dropout_rate": config.hidden_dropout,
        "n_positions": sizes.positions,
        "tie_word_embeddings": config.tied,
    }


def _tensors() -> dict[str, TensorRule]:
    rules: dict[str, TensorRule] = {
        WORD_TABLE: Same("shared.weight"),
        "output.weight": Same("lm_head.weight"),
    }
    for stack, mlp in (("encoder", 1), ("decoder", 2)):
        block, there = f"{stack}.layers.{{}}.", f"{stack}.block.{{}}.layer."
        unit = f"{there}{mlp}.DenseReluDense."
        same = {
            f"{stack}.final_norm": f"{stack}.final_layer_norm",
            f"{stack}.relative_positions": (
                f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
            ),
            f"{block}input_norm": f"{there}0.layer_norm",
            f"{block}attention.output": f"{there}0.SelfAttention.o",
            f"{block}cross_norm": f"{there}1.layer_norm",
            f"{block}cross_attention.query": f"{there}1.EncDecAttention.q",
            f"{block}cross_attention.output": f"{there}1.EncDecAttention.o",
            f"{block}post_attention_norm": f"{there}{mlp}.layer_norm",
            f"{block}mlp.fc2": f"{unit}wo",
        }
        rules |= {f"{ours}.weight": Same(f"{theirs}.weight") for ours, theirs in same.items()}
        q, k, v = (f"{there}0.SelfAttention.{letter}.weight" for letter in "qkv")
        rules[f"{block}attention.qkv.weight"] = QkvApart((q, k, v))
        k, v = (f"{there}1.EncDecAttention.{letter}.weight" for letter in "kv")
        rules[f"{block}cross_attention.key_value.weight"] = KvApart((k, v))
        rules[f"{block}mlp.fc1.weight"] = OneOrStacked(
            f"{unit}wi.weight", (f"{unit}wi_0.weight", f"{unit}wi_1.weight")
        )
    return rules


T5 = Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    prefix="",
    head=("lm_head.weight",),
    supported={
        "position_embedding_type": (PositionEmbedding.RELATIVE,),
        "normalization": (Normalization.RMS_NORM,),
        "norm_placement": (NormPlacement.BEFORE,),
        "glu": (None, *_GATED_NAMES),
        "activation": (*_PLAIN_NAMES, Activation.SILU),  # the last one of gated units alone
        "add_bias_linear": (False,),
        "add_qkv_bias": (False,),
        "use_parallel_residual": (False,),
        "qk_layernorm": (False,),
        "sliding_window": (None,),
        "embed_layernorm": (False,),
        "apply_residual_connection_post_layernorm": (False,),
        "softmax_scale": (1.0,),
    },
    free=("logit_divisor",),
    derived={
        "query_groups": lambda config: config.num_attention_heads,
        "logit_divisor": lambda config: math.sqrt(config.hidden_size) if config.tied else 1.0,
    },
    tensors=_tensors(),
    buffers=(r"EncDecAttention\.relative_attention_bias\.weight$",),
    read_config=_read,
    read_sizes=_sizes,
    write_config=_write,
    kinds=(T5_KIND,),
    copies={f"{stack}.embed_tokens.weight": WORD_TABLE for stack in ("encoder", "decoder")},
)
