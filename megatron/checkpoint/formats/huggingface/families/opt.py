"""OPT (arXiv 2205.01068): GPT-2's network with ReLU, q, k and v apart.

What a reader would get wrong: the table of positions has two rows more than positions, and begins
with them. Row 1 is of padding and row 0 of nothing; neither has a place here, and exports have
zeros there. OPT-350m, whose norms stand after the additions and whose embedding is projected, is
refused. Galactica is an OPT with another activation, without biases in its largest releases.
"""

from megatron.checkpoint.formats.huggingface.families import gpt2
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.checkpoint.formats.huggingface.layouts import QkvApart, Same, TensorRule
from megatron.config.model import Activation, ModelConfig
from megatron.json_values import JsonValue

_EPSILON = 1e-5  # of torch's LayerNorm, which no field changes
_ROWS_BEFORE = 2
_ACTIVATIONS: dict[str, dict[str, object]] = {**gpt2.PLAIN_ACTIVATIONS, "relu": {"relu": True}}
_ACTIVATION_NAMES = {**gpt2.ACTIVATION_NAMES, Activation.RELU: "relu"}


def _read(fields: Fields) -> dict[str, object]:
    hidden = fields.integer("hidden_size")
    fields.must_be("do_layer_norm_before", True, True, why="norms after additions, as in OPT-350m")
    fields.must_be(
        "word_embed_proj_dim", hidden, hidden, why="a projected embedding, as in OPT-350m"
    )
    fields.must_be("_remove_final_layer_norm", False, False, why="no norm at the end")
    fields.must_be("layer_norm_elementwise_affine", True, True, why="norms without parameters")
    fields.must_be("layerdrop", 0.0, 0.0, why="layers that training leaves out at random")
    return {
        "num_layers": fields.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": fields.integer("num_attention_heads"),
        "ffn_hidden_size": fields.integer("ffn_dim"),
        "hidden_dropout": fields.number("dropout", 0.1),
        "attention_dropout": fields.number("attention_dropout", 0.0),
        "layernorm_epsilon": _EPSILON,
        "max_position_embeddings": fields.integer("max_position_embeddings", 2048),
        "add_bias_linear": fields.boolean("enable_bias", True),
        "init_method_std": fields.number("init_std", 0.02),
        "untie_embeddings_and_output_weights": not fields.boolean("tie_word_embeddings", True),
        **fields.choice("activation_function", _ACTIVATIONS, "relu"),
    }


def _sizes(fields: Fields) -> Sizes:
    return Sizes(fields.integer("vocab_size"), fields.integer("max_position_embeddings", 2048))


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "word_embed_proj_dim": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "ffn_dim": config.ffn_width,
        "max_position_embeddings": sizes.positions,
        "activation_function": _ACTIVATION_NAMES[config.activation],
        "dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "enable_bias": config.add_bias_linear,
        "init_std": config.init_method_std,
        "do_layer_norm_before": True,
        "pad_token_id": None,  # absent would be a token of the release, of its vocabulary
        "tie_word_embeddings": config.tied,
    }


def _tensors() -> dict[str, TensorRule]:
    table: dict[str, TensorRule] = {
        "embedding.word.weight": Same("decoder.embed_tokens.weight"),
        "embedding.position.weight": Same("decoder.embed_positions.weight", skipped=_ROWS_BEFORE),
        "output.weight": Same("lm_head.weight"),
    }
    block, there = "layers.{}.", "decoder.layers.{}."
    same = {
        f"{block}input_norm": f"{there}self_attn_layer_norm",
        f"{block}attention.output": f"{there}self_attn.out_proj",
        f"{block}post_attention_norm": f"{there}final_layer_norm",
        f"{block}mlp.fc1": f"{there}fc1",
        f"{block}mlp.fc2": f"{there}fc2",
        "final_norm": "decoder.final_layer_norm",
    }
    for leaf in ("weight", "bias"):
        table |= {f"{ours}.{leaf}": Same(f"{key}.{leaf}") for ours, key in same.items()}
        q, k, v = (f"{there}self_attn.{letter}_proj.{leaf}" for letter in "qkv")
        table[f"{block}attention.qkv.{leaf}"] = QkvApart((q, k, v))
    return table


OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported={
        **gpt2.GPT2.supported,
        "activation": tuple(_ACTIVATION_NAMES),
        "add_bias_linear": (False, True),
        "has_qkv_bias_alone": (False,),
        "layernorm_epsilon": (_EPSILON,),
    },
    tensors=_tensors(),
    buffers=(),
    read_config=_read,
    read_sizes=_sizes,
    write_config=_write,
    plain_heads=True,
)
