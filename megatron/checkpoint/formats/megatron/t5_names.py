"""Names of a T5 in Megatron-LM's files of ranks (version 3 and older), to and from ours.

A T5 has two stacks in the language model, `encoder` and `decoder`, and a bias of the head beside
it. What a reader would get wrong: `post_attention_layernorm` of the decoder stands before cross
attention, and the norm before its MLP is `post_inter_attention_layernorm`.
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from megatron.checkpoint.bert_tensors import WORD_BIAS
from megatron.checkpoint.formats.megatron import names
from megatron.checkpoint.t5_tensors import STACKS

ENCODER, DECODER = STACKS
_CROSS = "inter_attention."
LEAVES = ("weight", "bias")
_FINAL_NORM = "final_norm"
# Our modules of a block in the order in which Megatron registers them, with their spellings there;
# the first is written.
_ENCODER_BLOCK: Mapping[str, tuple[str, ...]] = {
    "input_norm": ("input_layernorm", "input_norm"),
    "attention.qkv": ("self_attention.query_key_value", "attention.query_key_value"),
    "attention.output": ("self_attention.dense", "attention.dense"),
    "post_attention_norm": ("post_attention_layernorm", "post_attention_norm"),
    "mlp.fc1": ("mlp.dense_h_to_4h",),
    "mlp.fc2": ("mlp.dense_4h_to_h",),
}
ENCODER_MODULES = tuple(_ENCODER_BLOCK)
_DECODER_BLOCK: Mapping[str, tuple[str, ...]] = {
    **{ours: _ENCODER_BLOCK[ours] for ours in ("input_norm", "attention.qkv", "attention.output")},
    "cross_norm": _ENCODER_BLOCK["post_attention_norm"],
    "cross_attention.query": (f"{_CROSS}query",),
    "cross_attention.key_value": (f"{_CROSS}key_value",),
    "cross_attention.output": (f"{_CROSS}dense",),
    "post_attention_norm": ("post_inter_attention_layernorm", "post_inter_attention_norm"),
    **{ours: _ENCODER_BLOCK[ours] for ours in ("mlp.fc1", "mlp.fc2")},
}
_BLOCKS = {ENCODER: _ENCODER_BLOCK, DECODER: _DECODER_BLOCK}
_FINAL_NORMS = ("final_layernorm", "final_norm")
_EDGES = {
    "embedding.word_embeddings.weight": names.WORD,
    "embedding.position_embeddings.weight": names.POSITION,
    "output_layer.weight": names.OUTPUT,
    "lm_head.bias": WORD_BIAS,
}
_TO_EDGE = {ours: key for key, ours in _EDGES.items()}
_EDGE_ORDER = tuple(_TO_EDGE)
_FIRST_OF_HEAD = _EDGE_ORDER.index(names.OUTPUT)
_IN_STACK = re.compile(r"(encoder|decoder)\.(?:layers\.(\d+)\.)?(.+)")
_AFTER_LAYERS = 1 << 30  # the final norm of a stack


def _to_ours(spellings: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return {
        f"{key}.{leaf}": f"{ours}.{leaf}"
        for ours, keys in spellings.items()
        for key in keys
        for leaf in LEAVES
    }


_OURS = {
    stack: MappingProxyType(_to_ours(block) | _to_ours({_FINAL_NORM: _FINAL_NORMS}))
    for stack, block in _BLOCKS.items()
}


def is_t5(keys: Iterable[str]) -> bool:
    """Return whether these are Megatron's parameters of a T5: its decoder alone attends across."""
    return any(f".{_CROSS}" in key for key in keys)


def our_t5_name(key: str, *, first_layer: int = 0) -> str | None:
    """Return our name of Megatron's parameter `key`; None if its T5 does not have it.

    Args:
        key: dotted, without the prefix of `embedding.`, `encoder.`, `lm_head.` and so on.
        first_layer: the index in its stack of the file's layer 0.
    """
    match = _IN_STACK.fullmatch(key)
    if match is None:
        return _EDGES.get(key)
    stack, layer, part = match.groups()
    inside = _OURS[stack].get(part)
    if inside is None or (layer is None) != inside.startswith(_FINAL_NORM):
        return None
    at = "" if layer is None else f"layers.{first_layer + int(layer)}."
    return f"{stack}.{at}{inside}"


def megatron_t5_name(ours: str) -> str:
    """Undo `our_t5_name`, in the spelling of version 3, for a whole model; KeyError for others."""
    match = _IN_STACK.fullmatch(ours)
    if match is None:
        return _TO_EDGE[ours]
    stack, layer, part = match.groups()
    module, _, leaf = part.rpartition(".")
    if layer is None:
        return f"{stack}.{ {_FINAL_NORM: _FINAL_NORMS[0]}[module] }.{leaf}"
    return f"{stack}.layers.{layer}.{_BLOCKS[stack][module][0]}.{leaf}"


def t5_module_order(ours: str) -> tuple[int, int, int, str]:
    """Return a key that sorts our names as Megatron's modules hold them: `names.module_order`."""
    match = _IN_STACK.fullmatch(ours)
    if match is None:
        place = _EDGE_ORDER.index(ours)
        return 3 if place >= _FIRST_OF_HEAD else 0, 0, place, ""
    stack, layer, part = match.groups()
    module, _, leaf = part.rpartition(".")
    place = 0 if layer is None else [*_BLOCKS[stack]].index(module)
    at = _AFTER_LAYERS if layer is None else int(layer)
    return 1 + STACKS.index(stack), at, place, "ab"[leaf == "bias"]


T5_NAMES = names.NamesOfModel(our_t5_name, t5_module_order)
