"""GPT-2 (Radford et al. 2019): learned positions, matrices kept as [in, out], q k v in blocks."""

from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.checkpoint.formats.huggingface.layouts import QkvBlocks, Same
from megatron.config.model import Activation, ModelConfig, Normalization, PositionEmbedding
from megatron.json_values import JsonValue

# gelu_fast and gelu_pytorch_tanh are the same formula as gelu_new, written in another way.
PLAIN_ACTIVATIONS: dict[str, dict[str, object]] = {
    "gelu_new": {},
    "gelu_pytorch_tanh": {},
    "gelu_fast": {},
    "gelu": {"onnx_safe": True},
    "relu2": {"squared_relu": True},
}
ACTIVATION_NAMES = {
    Activation.GELU_TANH: "gelu_new",
    Activation.GELU_ERF: "gelu",
    Activation.SQUARED_RELU: "relu2",
}


def _read(fields: Fields) -> dict[str, object]:
    fields.must_be("scale_attn_weights", True, True, why="scores that are not scaled")
    fields.must_be(
        "scale_attn_by_inverse_layer_idx", False, False, why="scores divided by the layer's number"
    )
    fields.must_be("add_cross_attention", False, False, why="attention to an encoder")
    hidden = fields.integer("n_embd")
    return {
        "num_layers": fields.integer("n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": fields.integer("n_head"),
        "ffn_hidden_size": fields.integer("n_inner", 4 * hidden),
        "layernorm_epsilon": fields.number("layer_norm_epsilon", 1e-5),
        "hidden_dropout": fields.number("resid_pdrop", 0.1),
        "attention_dropout": fields.number("attn_pdrop", 0.1),
        "max_position_embeddings": fields.integer("n_positions", 1024),
        "untie_embeddings_and_output_weights": not fields.boolean("tie_word_embeddings", True),
        **fields.choice("activation_function", PLAIN_ACTIVATIONS, "gelu_new"),
    }


def _sizes(fields: Fields) -> Sizes:
    fields.get("embd_pdrop", None)  # there is one dropout of hidden states here: resid_pdrop
    return Sizes(fields.integer("vocab_size"), fields.integer("n_positions", 1024))


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    return {
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_width,
        "n_positions": sizes.positions,
        "activation_function": ACTIVATION_NAMES[config.activation],
        "layer_norm_epsilon": config.layernorm_epsilon,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "scale_attn_weights": True,
        "tie_word_embeddings": config.tied,
    }


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    head=("lm_head.weight",),
    supported={
        "position_embedding_type": (PositionEmbedding.LEARNED,),
        "normalization": (Normalization.LAYER_NORM,),
        "glu": (None,),
        "activation": tuple(ACTIVATION_NAMES),
        "add_bias_linear": (True,),
        "use_parallel_residual": (False,),
        "qk_layernorm": (False,),
        "sliding_window": (None,),
        "embed_layernorm": (False,),
        "apply_residual_connection_post_layernorm": (False,),
    },
    tensors={
        "embedding.word.weight": Same("wte.weight"),
        "embedding.position.weight": Same("wpe.weight"),
        "layers.{}.input_norm.weight": Same("h.{}.ln_1.weight"),
        "layers.{}.input_norm.bias": Same("h.{}.ln_1.bias"),
        "layers.{}.attention.qkv.weight": QkvBlocks("h.{}.attn.c_attn.weight", transposed=True),
        "layers.{}.attention.qkv.bias": QkvBlocks("h.{}.attn.c_attn.bias"),
        "layers.{}.attention.output.weight": Same("h.{}.attn.c_proj.weight", transposed=True),
        "layers.{}.attention.output.bias": Same("h.{}.attn.c_proj.bias"),
        "layers.{}.post_attention_norm.weight": Same("h.{}.ln_2.weight"),
        "layers.{}.post_attention_norm.bias": Same("h.{}.ln_2.bias"),
        "layers.{}.mlp.fc1.weight": Same("h.{}.mlp.c_fc.weight", transposed=True),
        "layers.{}.mlp.fc1.bias": Same("h.{}.mlp.c_fc.bias"),
        "layers.{}.mlp.fc2.weight": Same("h.{}.mlp.c_proj.weight", transposed=True),
        "layers.{}.mlp.fc2.bias": Same("h.{}.mlp.c_proj.bias"),
        "final_norm.weight": Same("ln_f.weight"),
        "final_norm.bias": Same("ln_f.bias"),
        "output.weight": Same("lm_head.weight"),
    },
    buffers=(r"\.attn\.bias$", r"\.attn\.masked_bias$"),
    read_config=_read,
    read_sizes=_sizes,
    write_config=_write,
    plain_heads=True,
)
