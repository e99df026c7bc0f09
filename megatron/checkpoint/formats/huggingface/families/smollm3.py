"""SmolLM3: a tied LLaMA of which every fourth layer does not rotate its queries and keys."""

from megatron.checkpoint.formats.huggingface.families import llama
from megatron.checkpoint.formats.huggingface.families.qwen import read_windows
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.model import ModelConfig
from megatron.json_values import JsonValue

_ROTARY_BASE = 2e6  # the default of transformers


def _read(fields: Fields) -> dict[str, object]:
    fields.get("num_key_value_heads")  # absent would mean 4 there, and as many as heads here
    fields.must_be("use_sliding_window", False, False, why="a window in some layers")
    read_windows(fields)
    interval = fields.integer("no_rope_layer_interval", 4)
    layers = range(fields.integer("num_hidden_layers"))
    # 1 is a layer that rotates; a longer list is for layers that a cut model no longer has.
    rotating = fields.get("no_rope_layers", [int((at + 1) % interval != 0) for at in layers])
    if not isinstance(rotating, list) or not set(rotating) <= {0, 1}:
        raise fields.wrong_kind("no_rope_layers", rotating, "a list of 0 and 1")
    return (
        llama.read_shape(fields, rotary_base=_ROTARY_BASE)
        | llama.read_biases(fields)
        | {
            "untie_embeddings_and_output_weights": not fields.boolean("tie_word_embeddings", True),
            "no_rope_freq": str([1 - one for one in rotating[: len(layers)]]),
        }
    )


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    without = config.layers_without_rotation
    bias = config.add_bias_linear
    return llama.write_shape(config, sizes) | {
        "attention_bias": bias,
        "mlp_bias": bias,
        "no_rope_layers": [int(at not in without) for at in range(config.num_layers)],
        "use_sliding_window": False,
        "pad_token_id": None,  # absent would be a token of the release, of its vocabulary
    }


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported={n: v for n, v in llama.LLAMA.supported.items() if n != "layers_without_rotation"},
    tensors=llama.LLAMA.tensors,
    buffers=llama.BUFFERS,
    read_config=_read,
    read_sizes=llama.read_llama_sizes,
    write_config=_write,
)
