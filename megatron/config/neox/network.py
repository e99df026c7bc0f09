"""What keys of gpt-neox about the network mean together."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.config.neox.reader import KeyReader
from megatron.json_values import JsonValue


class Meant(NamedTuple):
    """The value of a field of ours, and the key of gpt-neox that says so."""

    field: str
    value: JsonValue
    key: str


_GATED = {"swiglu": "swiglu", "geglu": "geglu", "reglu": "reglu"}
_POSITIONS = {
    "learned": "learned_absolute",
    "rotary": "rope",
    "alibi": "alibi",
    "none": "none",
}


def mlp_width(
    hidden: int, *, intermediate: int | None, expansion: float | None, multiple: int, gated: bool
) -> int:
    """Return the width of an MLP as gpt-neox computes it; of each half of a gated one.

    Args:
        multiple: mlp_multiple_of: the whole of both halves becomes a multiple of twice this.
    """
    width = intermediate or int(4 * hidden if expansion is None else expansion * hidden)
    if gated:
        width = int(2 * width / 3)
    whole = 2 * multiple * math.ceil(width / (2 * multiple))
    return whole // 2 if gated else whole


def initial_std(method: str, std: float, *, hidden: int, layers: int) -> float | None:
    """Return the standard deviation of one of gpt-neox's methods; None of one that is not normal.

    small_init: Nguyen and Salazar 2019 (arXiv 1910.05895); wang_init: of Mesh Transformer JAX.
    """
    return {
        "normal": std,
        "scaled_normal": std / math.sqrt(2 * layers),
        "single_residual_scaled_normal": std / math.sqrt(layers),
        "small_init": math.sqrt(2 / (5 * hidden)),
        "wang_init": 2 / layers / math.sqrt(hidden),
    }.get(method)


def _shape(reader: KeyReader) -> Iterator[Meant]:
    """Yield sizes, the width of the MLP among them."""
    hidden = reader.whole("hidden_size")
    for key in ("num_layers", "hidden_size", "seq_length"):
        value = reader.whole(key)
        if value is not None:
            yield Meant(key, value, key)
    if hidden:
        width = mlp_width(
            hidden,
            intermediate=reader.whole("intermediate_size"),
            expansion=reader.number("expansion_factor"),
            multiple=reader.whole("mlp_multiple_of") or 1,
            gated=(reader.text("activation") or "").lower() in _GATED,
        )
        key = "intermediate_size" if reader.has("intermediate_size") else "hidden_size"
        yield Meant("ffn_hidden_size", width, key)


def _norms(reader: KeyReader) -> Iterator[Meant]:
    """Yield the kind of norm and its epsilon."""
    fix = "use layernorm or rmsnorm"
    kind = reader.word("norm", {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}, fix)
    yield Meant("normalization", kind, "norm")
    key = "layernorm_epsilon" if kind == "LayerNorm" else "rms_norm_epsilon"
    yield Meant("layernorm_epsilon", reader.number(key), key)
    if kind == "LayerNorm" and not reader.switch("use_bias_in_norms"):
        reader.refuse("use_bias_in_norms", "a LayerNorm has a bias here", "use norm rmsnorm")


def _positions(reader: KeyReader) -> Iterator[Meant]:
    """Yield how positions are represented."""
    fix = f"use one of {', '.join(_POSITIONS)}"
    kind = reader.word("pos_emb", _POSITIONS, fix)
    yield Meant("position_embedding_type", kind, "pos_emb")
    rows, length = reader.whole("max_position_embeddings"), reader.whole("seq_length")
    if rows is not None and length is not None and rows < length:
        fix = f"use {length}"
        reader.refuse("max_position_embeddings", "it is less than the tokens of a sample", fix)
    if kind == "learned_absolute" and rows is not None:
        yield Meant("max_position_embeddings", rows, "max_position_embeddings")
    if kind == "rope":
        yield Meant("rotary_percent", reader.number("rotary_pct"), "rotary_pct")
        yield Meant("rotary_base", reader.number("rotary_emb_base"), "rotary_emb_base")


def _activation(reader: KeyReader) -> Iterator[Meant]:
    """Yield the activation; GELU has its tanh form only in neox's fused kernel."""
    fused = reader.switch("bias_gelu_fusion") and not reader.switch("onnx_safe")
    kinds: dict[str, JsonValue] = {"gelu": "gelu", **_GATED}
    kind = reader.word("activation", kinds, f"use one of {', '.join(kinds)}")
    if kind == "gelu":
        yield Meant("openai_gelu" if fused else "onnx_safe", True, "activation")
        return
    if kind == "geglu" and fused:
        reader.refuse("bias_gelu_fusion", "GEGLU has its exact form alone", "use false")
    yield Meant("glu_activation", kind, "activation")


def _biases(reader: KeyReader) -> Iterator[Meant]:
    """Yield whether linear layers have biases."""
    attention = reader.switch("use_bias_in_attn_linear")
    if attention is not reader.switch("use_bias_in_mlp"):
        problem = "biases of attention and of MLPs are one flag here"
        reader.refuse("use_bias_in_mlp", problem, f"use {str(attention).lower()} for both")
    yield Meant("add_bias_linear", attention, "use_bias_in_attn_linear")


def _attention(reader: KeyReader) -> Iterator[Meant]:
    """Yield the window of attention, once every layer is known to be of a kind that is here."""
    kinds = set(_attention_kinds(reader))
    if others := kinds - {"global", "flash"}:
        problem = f"layers of the kind {', '.join(sorted(others))} are not here"
        reader.refuse("attention_config", problem, "use global or flash for all layers")
    width = reader.whole("sliding_window_width")
    if width is None:
        return
    if kinds != {"flash"}:
        fix = 'use attention_config [[["flash"], "all"]], or leave it out'
        reader.refuse("sliding_window_width", "neox has windows in flash layers alone", fix)
    # FlashAttention counts the tokens before a token, and --sliding-window that token too.
    yield Meant("sliding_window", width + 1, "sliding_window_width")


def _attention_kinds(reader: KeyReader) -> list[str]:
    """Return the kind of each layer: a list of [kinds, times], of which times may be "all"."""
    config, layers = reader.value("attention_config"), reader.whole("num_layers") or 0
    if config is None:
        return ["global"] * layers
    kinds: list[str] = []
    for entry in config if isinstance(config, Sequence) and not isinstance(config, str) else [None]:
        if isinstance(entry, str):
            kinds.append(entry.lower())
            continue
        is_pair = isinstance(entry, Sequence) and len(entry) == 2
        names, times = (entry[0], entry[1]) if isinstance(entry, Sequence) and is_pair else (0, 0)
        if not isinstance(names, Sequence) or isinstance(names, str):
            reader.refuse(
                "attention_config", "it is no list of kinds and numbers", 'use [[["flash"], "all"]]'
            )
        each = [str(name).lower() for name in names]
        if isinstance(times, int):
            kinds += each * times
        elif each:
            kinds += (each * layers)[: layers - len(kinds)]
    if layers and len(kinds) != layers:
        problem = f"it names {len(kinds)} of {layers} layers"
        reader.refuse("attention_config", problem, f'use [[["flash"], {layers}]]')
    return kinds


def _initial_values(reader: KeyReader) -> Iterator[Meant]:
    """Yield the standard deviations of initial values."""
    hidden, layers = reader.whole("hidden_size"), reader.whole("num_layers")
    methods = {key: (reader.text(key) or "").lower() for key in _METHODS}
    if set(methods.values()) == {"xavier_uniform"}:
        yield Meant("init_method_xavier_uniform", True, "init_method")
        return
    if not hidden or not layers:
        return  # which is an error that names them
    std = reader.number("init_method_std") or 0.0
    for key, field in _METHODS.items():
        value = initial_std(methods[key], std, hidden=hidden, layers=layers)
        if value is None:
            fix = "use normal, scaled_normal, small_init, wang_init, or xavier_uniform for both"
            reader.refuse(key, "this distribution is not here", fix)
        yield Meant(field, value, key)


_METHODS = {
    "init_method": "init_method_std",
    "output_layer_init_method": "output_layer_init_method_std",
}

NETWORK = (_shape, _norms, _positions, _activation, _biases, _attention, _initial_values)
