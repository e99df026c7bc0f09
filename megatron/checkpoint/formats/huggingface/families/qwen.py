"""Qwen2 and 2.5 (arXiv 2407.10671), Qwen3 (arXiv 2505.09388).

They are LLaMA with q k v biases, or with norms of every query and key.
"""

from collections.abc import Sequence

from megatron.checkpoint.formats.huggingface.families import llama
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.model import ModelConfig
from megatron.json_values import JsonValue

FULL, SLIDING = "full_attention", "sliding_attention"
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
        if kinds is not None and set(kinds) != {FULL}:
            raise fields.refused("layer_types", kinds, [f"{FULL} in every layer"])
        return {"sliding_window": None}
    if kinds is None:
        kinds = [SLIDING if layer >= first else FULL for layer in range(layers)]
    return windows_of(fields, kinds, int(window))


def windows_of(fields: Fields, kinds: Sequence[str], window: int | None) -> dict[str, object]:
    """Return our flags of a window that the layers of one of the `kinds` have."""
    layers = fields.integer("num_hidden_layers")
    if len(kinds) != layers or not set(kinds) <= {FULL, SLIDING}:
        raise fields.refused("layer_types", kinds, [f"{FULL} or {SLIDING} for each layer"])
    windowed = [int(kind == SLIDING) for kind in kinds]
    if window is None or not any(windowed):
        return {"sliding_window": None}
    pattern = None if all(windowed) else str(windowed)
    return {"sliding_window": window, "window_attn_skip_freq": pattern}


def layer_kinds(config: ModelConfig) -> list[str]:
    """Return the kind of attention of each layer, as `layer_types` spells it."""
    if config.sliding_window is None:
        return [FULL] * config.num_layers
    full = config.layers_without_window
    return [FULL if layer in full else SLIDING for layer in range(config.num_layers)]


def _write_qwen(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    window, kinds = config.sliding_window, layer_kinds(config)
    return llama.write_shape(config, sizes) | {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": kinds.index(SLIDING) if window is not None else config.num_layers,
        "layer_types": [*kinds],
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
