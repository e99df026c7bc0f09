"""Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786).

What a reader would get wrong: norms are stored as what is added to a gain of 1, and ours as the
gain; the embedding is multiplied by the root of its width; `query_pre_attn_scalar` stands where the
width of a head would. Gemma 3 has norms of queries and keys in place of soft caps, and in layers
with a window another base of rotation.
"""

from collections.abc import Mapping

from megatron.checkpoint.formats.huggingface.families import llama
from megatron.checkpoint.formats.huggingface.families.qwen import (
    FULL,
    SLIDING,
    layer_kinds,
    windows_of,
)
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields, read_rope
from megatron.checkpoint.formats.huggingface.layouts import Same, TensorRule
from megatron.config.blocks import NormPlacement
from megatron.config.model import GluActivation, ModelConfig
from megatron.json_values import JsonValue

# The defaults of transformers.
_HEAD_WIDTH, _SCALAR, _WINDOW, _PATTERN = 256, 256, 4096, 6
_ROTARY_BASE, _WINDOW_ROTARY_BASE = 1e6, 1e4  # of Gemma 3
_GATES: Mapping[str, GluActivation] = {
    "gelu_pytorch_tanh": GluActivation.GEGLU_TANH,
    "gelu_new": GluActivation.GEGLU_TANH,
    "gelu": GluActivation.GEGLU,
}
_GATE_NAMES = {GluActivation.GEGLU_TANH: "gelu_pytorch_tanh", GluActivation.GEGLU: "gelu"}


def _read(fields: Fields, *, interval: int) -> dict[str, object]:
    """Return the fields that both spell alike; every `interval`-th layer has no window."""
    fields.get("num_key_value_heads")  # absent would mean 4 there, and as many as heads here
    fields.must_be("attention_bias", False, False, why="biases in attention alone")
    fields.must_be("use_bidirectional_attention", False, False, why="attention to later tokens")
    fields.get("hidden_act", None)  # of old releases, beside the field that is read
    fields.get("cache_implementation", None)  # of generation
    gate = fields.choice("hidden_activation", _GATES, "gelu_pytorch_tanh")
    layers = range(fields.integer("num_hidden_layers"))
    window = fields.integer("sliding_window", None if fields.has("sliding_window") else _WINDOW)
    kinds = fields.get("layer_types", [SLIDING if (at + 1) % interval else FULL for at in layers])
    return llama.read_sizes_of_blocks(fields, head_width=_HEAD_WIDTH) | {
        "glu_activation": gate.value,
        "norm_placement": "both",
        "embedding_multiplier": fields.integer("hidden_size") ** 0.5,
        "softmax_scale": fields.number("query_pre_attn_scalar", _SCALAR) ** -0.5,
        "untie_embeddings_and_output_weights": not fields.boolean("tie_word_embeddings", True),
        **windows_of(fields, kinds, window),
    }


def _read_gemma2(fields: Fields) -> dict[str, object]:
    caps = {
        "attention_soft_cap": ("attn_logit_softcapping", 50.0),
        "logit_soft_cap": ("final_logit_softcapping", 30.0),
    }
    # null is none, and absent is what transformers takes it to be.
    return (
        _read(fields, interval=2)
        | read_rope(fields)
        | {
            ours: fields.number(name, None if fields.has(name) else default)
            for ours, (name, default) in caps.items()
        }
    )


def _read_gemma3(fields: Fields) -> dict[str, object]:
    fields.must_be("attn_logit_softcapping", None, None, why="a soft cap that its class leaves out")
    interval = fields.integer("sliding_window_pattern", None) or fields.integer(
        "_sliding_window_pattern", _PATTERN
    )
    model = _read(fields, interval=interval) | {
        "logit_soft_cap": fields.number("final_logit_softcapping", None),
        "qk_layernorm": True,
    }
    rope = fields.mapping("rope_parameters")
    if not rope:  # before transformers 5
        model |= read_rope(fields, default=_ROTARY_BASE)
        own = fields.number("rope_local_base_freq", _WINDOW_ROTARY_BASE)
    else:
        inner = Fields(fields.path, rope)
        full, sliding = inner.mapping("full_attention"), inner.mapping("sliding_attention")
        length = fields.integer("max_position_embeddings")
        both = {"rope_parameters": full, "max_position_embeddings": length}
        model |= read_rope(Fields(fields.path, both), default=_ROTARY_BASE)
        of_windows = Fields(fields.path, sliding)
        of_windows.must_be("rope_type", "default", "default", why="scaling in layers with a window")
        own = of_windows.number("rope_theta", _WINDOW_ROTARY_BASE)
    return model | ({"window_rotary_base": own} if model["sliding_window"] is not None else {})


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    fields = llama.write_shape(config, sizes)
    del fields["hidden_act"]
    return fields | {
        "hidden_activation": _GATE_NAMES[config.glu or GluActivation.GEGLU_TANH],
        "attention_bias": False,
        "query_pre_attn_scalar": round(config.score_scale**-2),
        "sliding_window": config.sliding_window or _WINDOW,  # needed there if no layer has it
        "layer_types": [*layer_kinds(config)],
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        "pad_token_id": None,  # absent would be a token of the release, of its vocabulary
    }


def _write_gemma3(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    own = config.window_rotary_base
    return _write(config, sizes) | {
        "rope_local_base_freq": _WINDOW_ROTARY_BASE if own is None else own
    }


def _tensors(*, qk_norm: bool) -> dict[str, TensorRule]:
    table = {n: r for n, r in llama.tensors().items() if "_norm." not in n}
    norms = {
        "layers.{}.input_norm": "layers.{}.input_layernorm",
        "layers.{}.attention_output_norm": "layers.{}.post_attention_layernorm",
        "layers.{}.post_attention_norm": "layers.{}.pre_feedforward_layernorm",
        "layers.{}.mlp_output_norm": "layers.{}.post_feedforward_layernorm",
        "final_norm": "norm",
    }
    if qk_norm:
        norms |= {
            f"layers.{{}}.attention.{kind}_norm": f"layers.{{}}.self_attn.{kind[0]}_norm"
            for kind in ("query", "key")
        }
    return table | {
        f"{ours}.weight": Same(f"{key}.weight", less=1.0) for ours, key in norms.items()
    }


_SUPPORTED = {
    **{n: v for n, v in llama.SUPPORTED.items() if n != "layers_without_window"},
    "glu": tuple(_GATE_NAMES),
    "norm_placement": (NormPlacement.BOTH,),
    "add_bias_linear": (False,),
    "has_qkv_bias_alone": (False,),
}
_FREE = ("logit_soft_cap", "softmax_scale", "embedding_multiplier")
_DERIVED = {
    "embedding_multiplier": lambda config: config.hidden_size**0.5,
    "score_scale": lambda config: round(config.score_scale**-2) ** -0.5,  # of a whole number
}

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported={**_SUPPORTED, "qk_layernorm": (False,)},
    free=(*_FREE, "attention_soft_cap"),
    derived=_DERIVED,
    tensors=_tensors(qk_norm=False),
    buffers=llama.BUFFERS,
    read_config=_read_gemma2,
    read_sizes=llama.read_llama_sizes,
    write_config=_write,
)

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported={**_SUPPORTED, "qk_layernorm": (True,)},
    free=(*_FREE, "window_rotary_base"),
    derived={
        **_DERIVED,
        # Layers with a window are never scaled there.
        "window_rotary_base": lambda config: (
            config.window_rotary_base
            or (None if config.sliding_window is None else config.rotary_base)
        ),
    },
    tensors=_tensors(qk_norm=True),
    buffers=llama.BUFFERS,
    read_config=_read_gemma3,
    read_sizes=llama.read_llama_sizes,
    write_config=_write_gemma3,
)
