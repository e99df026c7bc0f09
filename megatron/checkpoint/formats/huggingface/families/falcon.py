"""Falcon (arXiv 2311.16867): attention and MLP side by side, and few heads of keys and values.

The rows of q, k and v stand group by group as ours do, with one group (7B) as with several. 40B
and 180B have two norms in a layer; 7B and 11B have one, which is read as two equal ones. What is
written has two. Models with ALiBi add it before they scale the scores, as no model here does.
"""

from megatron.checkpoint.formats.huggingface.families.gpt2 import (
    ACTIVATION_NAMES,
    PLAIN_ACTIVATIONS,
)
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields, read_rope, rope_scaling
from megatron.checkpoint.formats.huggingface.layouts import Same, TensorRule
from megatron.config.model import ModelConfig, Normalization, PositionEmbedding
from megatron.json_values import JsonValue

_LENGTH = 2048  # the default of transformers


def _read(fields: Fields) -> dict[str, object]:
    fields.must_be("alibi", False, False, why="ALiBi that is scaled with the scores")
    fields.must_be("parallel_attn", True, True, why="an MLP after attention, with Falcon's norms")
    fields.must_be(
        "apply_residual_connection_post_layernorm", False, False, why="residuals after norms"
    )
    norms = fields.integer("num_ln_in_parallel_attn", 1)  # or 2: the files tell them apart
    if norms > 2:
        raise fields.refused("num_ln_in_parallel_attn", norms, [1, 2])
    hidden = fields.integer_of("n_embed", "hidden_size")
    heads = fields.integer("num_attention_heads")
    groups = fields.integer("num_kv_heads", heads)
    is_multi_query = fields.boolean("multi_query", True)
    if not fields.boolean("new_decoder_architecture", False):
        groups = 1 if is_multi_query else heads
    return {
        "num_layers": fields.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": None if groups == heads else groups,
        "ffn_hidden_size": fields.integer("ffn_hidden_size", 4 * hidden),
        "layernorm_epsilon": fields.number("layer_norm_epsilon", 1e-5),
        "hidden_dropout": fields.number("hidden_dropout", 0.0),
        "attention_dropout": fields.number("attention_dropout", 0.0),
        "max_position_embeddings": fields.integer("max_position_embeddings", _LENGTH),
        "use_parallel_residual": True,
        "add_bias_linear": fields.boolean("bias", False),
        "untie_embeddings_and_output_weights": not fields.boolean("tie_word_embeddings", True),
        **fields.choice("activation", PLAIN_ACTIVATIONS, "gelu"),
        **read_rope(fields),
    }


def _sizes(fields: Fields) -> Sizes:
    return Sizes(fields.integer("vocab_size"), fields.integer("max_position_embeddings", _LENGTH))


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_kv_heads": config.query_groups,
        "ffn_hidden_size": config.ffn_width,
        "max_position_embeddings": sizes.positions,
        "activation": ACTIVATION_NAMES[config.activation],
        "layer_norm_epsilon": config.layernorm_epsilon,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "bias": config.add_bias_linear,
        "alibi": False,
        "parallel_attn": True,
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2,
        "rope_theta": config.rotary_base,
        "rope_scaling": rope_scaling(config),
        "tie_word_embeddings": config.tied,
    }


def _tensors() -> dict[str, TensorRule]:
    table: dict[str, TensorRule] = {
        "embedding.word.weight": Same("word_embeddings.weight"),
        "output.weight": Same("lm_head.weight"),
    }
    for kind in ("weight", "bias"):
        for ours, key in (
            ("layers.{}.input_norm", "h.{}.ln_attn"),
            ("layers.{}.attention.qkv", "h.{}.self_attention.query_key_value"),
            ("layers.{}.attention.output", "h.{}.self_attention.dense"),
            ("layers.{}.post_attention_norm", "h.{}.ln_mlp"),
            ("layers.{}.mlp.fc1", "h.{}.mlp.dense_h_to_4h"),
            ("layers.{}.mlp.fc2", "h.{}.mlp.dense_4h_to_h"),
            ("final_norm", "ln_f"),
        ):
            table[f"{ours}.{kind}"] = Same(f"{key}.{kind}")
    return table


FALCON = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    prefix="transformer.",
    head=("lm_head.weight",),
    supported={
        "position_embedding_type": (PositionEmbedding.ROPE,),
        "rotary_percent": (1.0,),
        "layers_without_rotation": ((),),
        "normalization": (Normalization.LAYER_NORM,),
        "glu": (None,),
        "activation": tuple(ACTIVATION_NAMES),
        "has_qkv_bias_alone": (False,),
        "kv_channels": (None,),
        "use_parallel_residual": (True,),
        "qk_layernorm": (False,),
        "sliding_window": (None,),
        "embed_layernorm": (False,),
        "apply_residual_connection_post_layernorm": (False,),
    },
    tensors=_tensors(),
    buffers=(r"\.rotary_emb\.inv_freq$", r"\.rotary\.inv_freq$"),
    read_config=_read,
    read_sizes=_sizes,
    write_config=_write,
    for_several={
        f"input_layernorm.{kind}": (f"ln_attn.{kind}", f"ln_mlp.{kind}")
        for kind in ("weight", "bias")
    },
)
