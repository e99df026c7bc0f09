"""Qwen2 and 2.5 (arXiv 2407.10671), Qwen3 (arXiv 2505.09388).

They are LLaMA with q k v biases, or with norms of every query and key.
"""

from megatron.checkpoint.formats.huggingface.families import llama
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.model import ModelConfig
from megatron.json_values import JsonValue

_FULL, _SLIDING = "full_attention", "sliding_attention"
_QWEN3_HEAD_WIDTH = 128  # the default of transformers


def _read_qwen2(fields: Fields) -> dict[str, object]:
    fields.get("num_key_value_heads")  # absent would mean 32 there, and as many as heads here
    return llama.read_shape(fields) | {"add_qkv_bias": True} | read_windows(fields)


def _read_qwen3(fields: Fields) -> dict[str, object]:
    fields.must_be("attention_bias", False, False, why="biases in attention alone")
    fields.get("num_key_value_heads")
    shape = llama.read_shape(fields, head_width=_QWEN3_HEAD_WIDTH)
    return shape | {"qk_layernorm": True} | read_windows(fields)


def read_windows(fields: Fields) -> dict[str, object]:
    """Return our flags of the window, and of the layers that have none."""
    used = fields.boolean("use_sliding_window", False)
    window = fields.integer("sliding_window", 4096) if used else fields.get("sliding_window", None)
    layers = fields.integer("num_hidden_layers")
    first = fields.get("max_window_layers", 28)
    kinds = fields.get("layer_types", None)
    if not used:
        if kinds is not None and set(kinds) != {_FULL}:
            raise fields.refused("layer_types", kinds, [f"{_FULL} in every layer"])
        return {"sliding_window": None}
    if kinds is None:
        kinds = [_SLIDING if layer >= first else _FULL for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {_FULL, _SLIDING}:
        raise fields.refused("layer_types", kinds, [f"{_FULL} or {_SLIDING} for each layer"])
    windowed = [int(kind == _SLIDING) for kind in kinds]
    if not any(windowed):
        return {"sliding_window": None}
    pattern = None if all(windowed) else str(windowed)
    return {"sliding_window": int(window), "window_attn_skip_freq": pattern}


def _write_qwen(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    window, full = config.sliding_window, config.layers_without_window
    if window is None:
        full = tuple(range(config.num_layers))
    kinds = [_FULL if layer in full else _SLIDING for layer in range(config.num_layers)]
    return llama.write_shape(config, sizes) | {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": kinds.index(_SLIDING) if window is not None else config.num_layers,
        "layer_types": kinds,
    }


def _write_qwen2(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    # Qwen2 has no head_dim of its own: transformers shares the hidden size out.
    fields = _write_qwen(config, sizes)
    del fields["head_dim"]
    return fields


def _write_qwen3(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    return _write_qwen(config, sizes) | {"attention_bias": False}


# Any layer may have the window or not.
_SUPPORTED = {n: v for n, v in llama.SUPPORTED.items() if n != "layers_without_window"}

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported={
        **_SUPPORTED,
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
        **_SUPPORTED,
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
