"""GPT-NeoX and Pythia: attention and MLP side by side, part of each head rotates.

q, k and v are stored head by head as in our model, and rotation pairs the halves of the rotating
channels as ours does, so no row moves.
"""

from megatron.checkpoint.formats.huggingface.families.gpt2 import (
    ACTIVATION_NAMES,
    PLAIN_ACTIVATIONS,
)
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import (
    Fields,
    read_rope,
    read_rotary_share,
    rope_scaling,
)
from megatron.checkpoint.formats.huggingface.layouts import Same
from megatron.config.model import ModelConfig, Normalization, PositionEmbedding
from megatron.json_values import JsonValue


def _read(fields: Fields) -> dict[str, object]:
    fields.must_be("attention_bias", True, True, why="biases in the MLP alone")
    return {
        "num_layers": fields.integer("num_hidden_layers"),
        "hidden_size": fields.integer("hidden_size"),
        "num_attention_heads": fields.integer("num_attention_heads"),
        "ffn_hidden_size": fields.integer("intermediate_size"),
        "layernorm_epsilon": fields.number("layer_norm_eps", 1e-5),
        "hidden_dropout": fields.number("hidden_dropout", 0.0),
        "attention_dropout": fields.number("attention_dropout", 0.0),
        "max_position_embeddings": fields.integer("max_position_embeddings", 2048),
        "use_parallel_residual": fields.boolean("use_parallel_residual", True),
        "untie_embeddings_and_output_weights": not fields.boolean("tie_word_embeddings", False),
        **fields.choice("hidden_act", PLAIN_ACTIVATIONS, "gelu"),
        **read_rope(fields, base_name="rotary_emb_base"),
        "rotary_percent": read_rotary_share(fields, "rotary_pct", 0.25),
    }


def _sizes(fields: Fields) -> Sizes:
    return Sizes(fields.integer("vocab_size"), fields.integer("max_position_embeddings", 2048))


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_width,
        "max_position_embeddings": sizes.positions,
        "hidden_act": ACTIVATION_NAMES[config.activation],
        "layer_norm_eps": config.layernorm_epsilon,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "attention_bias": True,
        "rotary_pct": config.rotary_percent,
        "rotary_emb_base": config.rotary_base,
        "rope_scaling": rope_scaling(config),
        "use_parallel_residual": config.use_parallel_residual,
        "tie_word_embeddings": config.tied,
    }


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    # transformers 5 calls it lm_head in memory; files have had the first name all along.
    head=("embed_out.weight", "lm_head.weight"),
    supported={
        "position_embedding_type": (PositionEmbedding.ROPE,),
        "layers_without_rotation": ((),),
        "normalization": (Normalization.LAYER_NORM,),
        "glu": (None,),
        "activation": tuple(ACTIVATION_NAMES),
        "add_bias_linear": (True,),
        "qk_layernorm": (False,),
        "sliding_window": (None,),
        "embed_layernorm": (False,),
        "apply_residual_connection_post_layernorm": (False,),
    },
    tensors={
        "embedding.word.weight": Same("embed_in.weight"),
        **{
            f"layers.{{}}.{ours}.{kind}": Same(f"layers.{{}}.{key}.{kind}")
            for ours, key in (
                ("input_norm", "input_layernorm"),
                ("attention.qkv", "attention.query_key_value"),
                ("attention.output", "attention.dense"),
                ("post_attention_norm", "post_attention_layernorm"),
                ("mlp.fc1", "mlp.dense_h_to_4h"),
                ("mlp.fc2", "mlp.dense_4h_to_h"),
            )
            for kind in ("weight", "bias")
        },
        "final_norm.weight": Same("final_layer_norm.weight"),
        "final_norm.bias": Same("final_layer_norm.bias"),
        "output.weight": Same("embed_out.weight"),
    },
    buffers=(
        r"\.attention\.bias$",
        r"\.attention\.masked_bias$",
        r"\.rotary_emb\.inv_freq$",
    ),
    read_config=_read,
    read_sizes=_sizes,
    write_config=_write,
    plain_heads=True,
)
