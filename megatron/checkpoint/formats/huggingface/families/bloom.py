"""BLOOM (arXiv 2211.05100): ALiBi, and a norm after the word embedding.

q, k and v are stored head by head as in our model, since it was trained with Megatron. The MLP is
always four times as wide as the hidden states. Releases differ in the names of three sizes.
"""

from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.checkpoint.formats.huggingface.layouts import Same
from megatron.config.model import Activation, ModelConfig, Normalization, PositionEmbedding
from megatron.json_values import JsonValue

_LENGTH = 2048  # of the release's sequences, where its config does not say; ALiBi has no limit


def _read(fields: Fields) -> dict[str, object]:
    fields.boolean("slow_but_exact", False)  # adds up in another order
    return {
        "num_layers": fields.integer_of("n_layer", "num_hidden_layers"),
        "hidden_size": fields.integer_of("n_embed", "hidden_size"),
        "num_attention_heads": fields.integer_of("n_head", "num_attention_heads"),
        "position_embedding_type": "alibi",
        "embed_layernorm": True,
        "layernorm_epsilon": fields.number("layer_norm_epsilon", 1e-5),
        "hidden_dropout": fields.number("hidden_dropout", 0.0),
        "attention_dropout": fields.number("attention_dropout", 0.0),
        "apply_residual_connection_post_layernorm": fields.boolean(
            "apply_residual_connection_post_layernorm", False
        ),
        "untie_embeddings_and_output_weights": not fields.boolean("tie_word_embeddings", True),
    }


def _sizes(fields: Fields) -> Sizes:
    return Sizes(fields.integer("vocab_size"), fields.integer("seq_length", _LENGTH))


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    return {
        "n_layer": config.num_layers,
        "hidden_size": config.hidden_size,
        "n_head": config.num_attention_heads,
        "seq_length": sizes.positions,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "apply_residual_connection_post_layernorm": (
            config.apply_residual_connection_post_layernorm
        ),
        "tie_word_embeddings": config.tied,
    }


BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    prefix="transformer.",
    head=("lm_head.weight",),
    supported={
        "position_embedding_type": (PositionEmbedding.ALIBI,),
        "normalization": (Normalization.LAYER_NORM,),
        "glu": (None,),
        "activation": (Activation.GELU_TANH,),
        "add_bias_linear": (True,),
        "use_parallel_residual": (False,),
        "qk_layernorm": (False,),
        "sliding_window": (None,),
        "embed_layernorm": (True,),
    },
    tensors={
        "embedding.word.weight": Same("word_embeddings.weight"),
        **{
            f"{ours}.{kind}": Same(f"{key}.{kind}")
            for ours, key in (
                ("embedding.norm", "word_embeddings_layernorm"),
                ("layers.{}.input_norm", "h.{}.input_layernorm"),
                ("layers.{}.attention.qkv", "h.{}.self_attention.query_key_value"),
                ("layers.{}.attention.output", "h.{}.self_attention.dense"),
                ("layers.{}.post_attention_norm", "h.{}.post_attention_layernorm"),
                ("layers.{}.mlp.fc1", "h.{}.mlp.dense_h_to_4h"),
                ("layers.{}.mlp.fc2", "h.{}.mlp.dense_4h_to_h"),
                ("final_norm", "ln_f"),
            )
            for kind in ("weight", "bias")
        },
        "output.weight": Same("lm_head.weight"),
    },
    buffers=(),
    read_config=_read,
    read_sizes=_sizes,
    write_config=_write,
    plain_heads=True,
    derived={"ffn_width": lambda config: 4 * config.hidden_size},
)
