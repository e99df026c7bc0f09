"""LLaMA 1 to 3 (arXiv 2302.13971, 2307.09288, 2407.21783), and what its descendants share.

q, k and v are three matrices of whole heads, gate and up are two. Rotation pairs the halves of a
head: the permutation of Meta's own release is undone in the files already.
"""

from collections.abc import Mapping, Sequence

from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import (
    ROTARY_BASE,
    Fields,
    read_rope,
    rope_scaling,
)
from megatron.checkpoint.formats.huggingface.layouts import (
    QkvApart,
    Same,
    Stacked,
    TensorRule,
)
from megatron.config.model import GluActivation, ModelConfig, Normalization, PositionEmbedding
from megatron.json_values import JsonValue

_GLU: dict[str, dict[str, object]] = {
    "silu": {"swiglu": True},
    "swish": {"swiglu": True},
    "gelu": {"glu_activation": "geglu"},
    "relu": {"glu_activation": "reglu"},
    "linear": {"glu_activation": "liglu"},
}
_GLU_NAMES = {
    GluActivation.SWIGLU: "silu",
    GluActivation.GEGLU: "gelu",
    GluActivation.REGLU: "relu",
    GluActivation.LIGLU: "linear",
}
SUPPORTED: Mapping[str, Sequence[object]] = {
    "position_embedding_type": (PositionEmbedding.ROPE,),
    "rotary_percent": (1.0,),
    "layers_without_rotation": ((),),
    "layers_without_window": ((),),
    "normalization": (Normalization.RMS_NORM,),
    "glu": tuple(_GLU_NAMES),
    "use_parallel_residual": (False,),
    "embed_layernorm": (False,),
    "apply_residual_connection_post_layernorm": (False,),
}
BUFFERS = (r"\.rotary_emb\.inv_freq$",)


def read_shape(
    fields: Fields, *, head_width: int | None = None, rotary_base: float = ROTARY_BASE
) -> dict[str, object]:
    """Return the fields that LLaMA and most of its descendants spell alike.

    Args:
        head_width: of a head when config.json does not give it; None: hidden size / heads.
        rotary_base: where config.json gives none.
    """
    return {
        **read_sizes_of_blocks(fields, head_width=head_width),
        **fields.choice("hidden_act", _GLU, "silu"),
        **read_rope(fields, default=rotary_base),
    }


def read_sizes_of_blocks(fields: Fields, *, head_width: int | None = None) -> dict[str, object]:
    """Return the same without gate and rotation."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    width = fields.integer("head_dim", head_width)
    groups = fields.integer("num_key_value_heads", heads)
    return {
        "num_layers": fields.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": None if groups == heads else groups,
        "kv_channels": None if width is None or width * heads == hidden else width,
        "ffn_hidden_size": fields.integer("intermediate_size"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": fields.number("rms_norm_eps", 1e-6),
        "hidden_dropout": 0.0,
        "attention_dropout": fields.number("attention_dropout", 0.0),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "untie_embeddings_and_output_weights": not fields.boolean("tie_word_embeddings", False),
        "add_bias_linear": False,
    }


def read_llama_sizes(fields: Fields) -> Sizes:
    """Return rows of the vocabulary, and the positions that the release is meant for."""
    return Sizes(fields.integer("vocab_size"), fields.integer("max_position_embeddings"))


def write_shape(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    """Return what `read_shape` reads."""
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_width,
        "intermediate_size": config.ffn_width,
        "max_position_embeddings": sizes.positions,
        # None for gates that a descendant names itself.
        "hidden_act": _GLU_NAMES.get(config.glu or GluActivation.SWIGLU),
        "rms_norm_eps": config.layernorm_epsilon,
        "attention_dropout": config.attention_dropout,
        "rope_theta": config.rotary_base,
        "rope_scaling": rope_scaling(config),
        "tie_word_embeddings": config.tied,
    }


def tensors(
    *, qkv_bias: bool = False, other_biases: bool = False, qk_norm: bool = False
) -> Mapping[str, TensorRule]:
    """Return the table of LLaMA, with the biases and norms that a descendant adds."""
    attention = "layers.{}.self_attn"
    table: dict[str, TensorRule] = {
        "embedding.word.weight": Same("embed_tokens.weight"),
        "layers.{}.input_norm.weight": Same("layers.{}.input_layernorm.weight"),
        "layers.{}.post_attention_norm.weight": Same("layers.{}.post_attention_layernorm.weight"),
        "final_norm.weight": Same("norm.weight"),
        "output.weight": Same("lm_head.weight"),
    }
    if qk_norm:
        table["layers.{}.attention.query_norm.weight"] = Same(f"{attention}.q_norm.weight")
        table["layers.{}.attention.key_norm.weight"] = Same(f"{attention}.k_norm.weight")
    for kind, has_qkv, has_others in (
        ("weight", True, True),
        ("bias", qkv_bias, other_biases),
    ):
        if has_qkv:
            q, k, v = (f"{attention}.{letter}_proj.{kind}" for letter in "qkv")
            table[f"layers.{{}}.attention.qkv.{kind}"] = QkvApart((q, k, v))
        if has_others:
            gate, up = (f"layers.{{}}.mlp.{name}_proj.{kind}" for name in ("gate", "up"))
            table[f"layers.{{}}.attention.output.{kind}"] = Same(f"{attention}.o_proj.{kind}")
            table[f"layers.{{}}.mlp.fc1.{kind}"] = Stacked((gate, up))
            table[f"layers.{{}}.mlp.fc2.{kind}"] = Same(f"layers.{{}}.mlp.down_proj.{kind}")
    return table


def read_biases(fields: Fields) -> dict[str, object]:
    """Return whether all matrices of the blocks have biases, or none."""
    bias = fields.boolean("attention_bias", False)
    fields.must_be("mlp_bias", bias, False, why="biases in one half of a block alone")
    return {"add_bias_linear": bias}


def _read(fields: Fields) -> dict[str, object]:
    return read_shape(fields) | read_biases(fields)


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    bias = config.add_bias_linear
    return write_shape(config, sizes) | {"attention_bias": bias, "mlp_bias": bias}


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported={
        **SUPPORTED,
        "has_qkv_bias_alone": (False,),
        "qk_layernorm": (False,),
        "sliding_window": (None,),
    },
    tensors=tensors(qkv_bias=True, other_biases=True),
    buffers=BUFFERS,
    read_config=_read,
    read_sizes=read_llama_sizes,
    write_config=_write,
)
