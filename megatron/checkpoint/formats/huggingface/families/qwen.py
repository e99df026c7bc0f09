"""Qwen2 and 2.5 (arXiv 2407.10671), Qwen3 (arXiv 2505.09388).

They are LLaMA with q k v biases, or with norms of every query and key.
"""

from megatron.checkpoint.formats.huggingface.families import llama
from megatron.checkpoint.formats.huggingface.families.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.families.fields import Fields
from megatron.config.model import ModelConfig
from megatron.json_values import JsonValue

_QWEN3_HEAD_WIDTH = 128  # the default of transformers


def _read_qwen2(fields: Fields) -> dict[str, object]:
    fields.get("num_key_value_heads")  # absent would mean 32 there, and as many as heads here
    return llama.read_shape(fields) | {"add_qkv_bias": True, "sliding_window": read_window(fields)}


def _read_qwen3(fields: Fields) -> dict[str, object]:
    fields.must_be("attention_bias", False, False, why="biases in attention alone")
    fields.get("num_key_value_heads")
    shape = llama.read_shape(fields, head_width=_QWEN3_HEAD_WIDTH)
    return shape | {"qk_layernorm": True, "sliding_window": read_window(fields)}


def read_window(fields: Fields) -> int | None:
    """Return the window that all layers have, or None; a window in some of them is refused."""
    used = fields.boolean("use_sliding_window", False)
    window = fields.integer("sliding_window", 4096) if used else fields.get("sliding_window", None)
    layers = fields.integer("num_hidden_layers")
    first = fields.get("max_window_layers", 28)
    kinds = fields.get("layer_types", None)
    if not used:
        if kinds is not None and set(kinds) != {"full_attention"}:
            raise fields.refused("layer_types", kinds, ["full_attention in every layer"])
        return None
    windowed = layers - min(first, layers)
    if kinds is not None:
        windowed = sum(kind == "sliding_attention" for kind in kinds)
    if windowed not in (0, layers):
        raise fields.refused(
            "max_window_layers" if kinds is None else "layer_types",
            first if kinds is None else kinds,
            [f"0 or {layers}" if kinds is None else "one kind in every layer"],
            why="a window in some layers and not in others",
        )
    return int(window) if windowed else None


def _write_qwen(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    window = config.sliding_window
    kind = "full_attention" if window is None else "sliding_attention"
    return llama.write_shape(config, sizes) | {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": config.num_layers if window is None else 0,
        "layer_types": [kind] * config.num_layers,
    }


def _write_qwen2(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    # Qwen2 has no head_dim of its own: transformers shares the hidden size out.
    fields = _write_qwen(config, sizes)
    del fields["head_dim"]
    return fields


def _write_qwen3(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    return _write_qwen(config, sizes) | {"attention_bias": False}


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported={
        **llama.SUPPORTED,
        "has_qkv_bias_alone": (True,),
        "qk_layernorm": (False,),
        "kv_channels": (None,),
    },
    tensors=llama.tensors(qkv_bias=True),
    buffers=llama.BUFFERS,
    read_config=_read_qwen2,
    read_sizes=llama.read_llama_sizes,
    write_config=_write_qwen2,
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported={
        **llama.SUPPORTED,
        "add_bias_linear": (False,),
        "has_qkv_bias_alone": (False,),
        "qk_layernorm": (True,),
    },
    tensors=llama.tensors(qk_norm=True),
    buffers=llama.BUFFERS,
    read_config=_read_qwen3,
    read_sizes=llama.read_llama_sizes,
    write_config=_write_qwen3,
)
