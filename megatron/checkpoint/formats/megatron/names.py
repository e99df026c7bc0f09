"""Names and layouts of Megatron's GPT and BERT, in all spellings, to and from ours: one table.

All descendants of Megatron-LM (bigscience, DeepSpeed's engines, Megatron core) keep the same
parameters under slightly different names and row orders. They count layers from 0 within a file,
this program over the whole model. The formats read and write the files.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.bert_tensors import (
    ORDER,
    POOLER,
    TYPE_TABLE,
    WORD_BIAS,
    WORDS,
    WORDS_NORM,
)
from megatron.mpu.partition import Partition

WORD, POSITION, OUTPUT = "embedding.word.weight", "embedding.position.weight", "output.weight"
EMBEDDING_NORM = "embedding.norm"
TYPES = TYPE_TABLE.removesuffix(".weight")
_WORD_BIAS = WORD_BIAS.removesuffix(".bias")

# Our module inside a block: its spellings in Megatrons; the first is written.
_BLOCK: Mapping[str, tuple[str, ...]] = {
    "input_norm": ("input_layernorm", "input_norm"),
    "attention.qkv": (
        "self_attention.query_key_value",
        "attention.query_key_value",  # before Megatron-LM 2.4
        "self_attention.linear_qkv",  # Megatron core
    ),
    "attention.output": ("self_attention.dense", "attention.dense", "self_attention.linear_proj"),
    "attention.query_norm": ("self_attention.q_layernorm",),
    "attention.key_norm": ("self_attention.k_layernorm",),
    "post_attention_norm": (
        "post_attention_layernorm",
        "post_attention_norm",
        "pre_mlp_layernorm",  # Megatron core
    ),
    "mlp.fc1": ("mlp.dense_h_to_4h", "mlp.linear_fc1"),
    "mlp.fc2": ("mlp.dense_4h_to_h", "mlp.linear_fc2"),
}
# Core fuses a norm with the matrix behind it, and keeps both under the matrix's name.
_FUSED_NORMS: Mapping[str, str] = {
    "self_attention.linear_qkv.layer_norm_weight": "input_norm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_norm.bias",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_norm.weight",
    "mlp.linear_fc1.layer_norm_bias": "post_attention_norm.bias",
}
_EDGES: Mapping[str, str] = {
    "embedding.word_embeddings.weight": WORD,
    "embedding.word_embeddings.norm.weight": f"{EMBEDDING_NORM}.weight",  # bigscience
    "embedding.word_embeddings.norm.bias": f"{EMBEDDING_NORM}.bias",
    "embedding.position_embeddings.weight": POSITION,
    "output_layer.weight": OUTPUT,
    "embedding.tokentype_embeddings.weight": TYPE_TABLE,
    "lm_head.bias": WORD_BIAS,
    "output_layer.bias": WORD_BIAS,  # Megatron core
}
# The heads of a BERT: our modules and their spellings in Megatrons; the first is written.
_HEADS: Mapping[str, tuple[str, ...]] = {
    POOLER: ("pooler.dense",),
    WORDS: ("lm_head.dense",),
    WORDS_NORM: ("lm_head.layernorm", "lm_head.norm", "lm_head.layer_norm"),
    ORDER: ("binary_head",),
}
# The heads beside the language model, not in it.
_BERT_HEADS = ("lm_head.", "binary_head.")
_TRUNKS = ("encoder", "transformer", "decoder")  # of the blocks: since 2.4, before, and in core
_FINAL_NORMS = ("final_layernorm", "final_norm")
_LAYER = re.compile(r"(?:encoder|transformer|decoder)\.layers\.(\d+)\.(.+)")
_OUR_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_LEAVES = ("weight", "bias")
# Modules whose rows are those of heads; the latter two in the decoder of a T5.
_SPLIT_BY_HEADS = ("attention.qkv", "cross_attention.query", "cross_attention.key_value")
# Entries beside parameters that are not used.
_NOT_PARAMETERS = re.compile(
    r"(.*\.)?(_extra_state|rotary_(pos_)?emb(edding)?(s)?\.inv_freq|inv_freq|masked_bias)"
)


def _block_table() -> dict[str, str]:
    table = dict(_FUSED_NORMS)
    for ours, spellings in _BLOCK.items():
        for key in spellings:
            table |= {f"{key}.{leaf}": f"{ours}.{leaf}" for leaf in _LEAVES}
    return table


BLOCK: Mapping[str, str] = MappingProxyType(_block_table())
"""Our name of a parameter within a block, by every name it has elsewhere."""

EDGES: Mapping[str, str] = MappingProxyType(
    dict(_EDGES)
    | {
        f"{trunk}.{norm}.{leaf}": f"final_norm.{leaf}"
        for trunk in _TRUNKS
        for norm in _FINAL_NORMS
        for leaf in _LEAVES
    }
    | {
        f"{key}.{leaf}": f"{ours}.{leaf}"
        for ours, spellings in _HEADS.items()
        for key in spellings
        for leaf in _LEAVES
    }
)
"""The same outside of blocks, without `module.`, `model.` or `language_model.` before it."""

_TO_BLOCK = {f"{ours}.{leaf}": f"{names[0]}.{leaf}" for ours, names in _BLOCK.items()
             for leaf in _LEAVES}  # fmt: skip
# The names of megatron-core where it fuses norms with the matrices behind them, as with Transformer
# Engine and in its distributed checkpoints.
_TO_CORE_BLOCK = {
    **{f"{ours}.{leaf}": f"{spellings[-1]}.{leaf}" for ours, spellings in _BLOCK.items()
       for leaf in _LEAVES},
    **{ours: core for core, ours in _FUSED_NORMS.items()},
}  # fmt: skip
_TO_CORE_EDGE = {
    **{
        ours: key
        for key, ours in _EDGES.items()
        if not ours.startswith(EMBEDDING_NORM) and key != "lm_head.bias"
    },
    **{f"{ours}.{leaf}": f"{spellings[-1]}.{leaf}" for ours, spellings in _HEADS.items()
       for leaf in _LEAVES},
}  # fmt: skip
MODULES = (
    *("embedding.word", EMBEDDING_NORM, "embedding.position", TYPES),
    *(*_BLOCK, "final_norm", POOLER, "output", _WORD_BIAS, WORDS, WORDS_NORM, ORDER),
)
_TO_EDGE = {ours: key for key, ours in reversed([*EDGES.items()])}


def our_name(key: str, *, first_layer: int = 0) -> str | None:
    """Return our name of Megatron's parameter `key`; None if GPT and BERT do not have it.

    Args:
        key: dotted, without the prefix of `embedding.`, `encoder.`, `lm_head.` and so on.
        first_layer: the index in the whole model of the file's layer 0.
    """
    if key in EDGES:
        return EDGES[key]
    match = _LAYER.fullmatch(key)
    if match is None or match[2] not in BLOCK:
        return None
    return f"layers.{first_layer + int(match[1])}.{BLOCK[match[2]]}"


def megatron_name(ours: str, *, first_layer: int = 0) -> str:
    """Undo `our_name`, in the spelling of Megatron-LM's version 3; KeyError for other names."""
    match = _OUR_LAYER.fullmatch(ours)
    if match is None:
        return _TO_EDGE[ours]
    return f"encoder.layers.{int(match[1]) - first_layer}.{_TO_BLOCK[match[2]]}"


def core_name(ours: str, *, trunk: str, first_layer: int = 0) -> str | None:
    """Return megatron-core's name of our parameter; None if core has none.

    Args:
        trunk: `decoder` of a GPT, `encoder` of a BERT.
        first_layer: the index in the whole model of the file's layer 0.
    """
    match = _OUR_LAYER.fullmatch(ours)
    if match is not None:
        inside = _TO_CORE_BLOCK.get(match[2])
        return None if inside is None else f"{trunk}.layers.{int(match[1]) - first_layer}.{inside}"
    if ours.startswith("final_norm."):
        return f"{trunk}.final_layernorm.{ours.removeprefix('final_norm.')}"
    return _TO_CORE_EDGE.get(ours)


def is_known(ours: str) -> bool:
    """Return whether Megatron's GPT or BERT has a parameter for ours."""
    match = _OUR_LAYER.fullmatch(ours)
    return (ours in _TO_EDGE) if match is None else (match[2] in _TO_BLOCK)


def module_order(ours: str, *, modules: tuple[str, ...] = MODULES) -> tuple[int, int, int, str]:
    """Return a key that sorts our names as Megatron's modules hold their parameters.

    Optimizers there number parameters in that order: weights before biases, modules as registered.
    """
    match = _OUR_LAYER.fullmatch(ours)
    part = ours if match is None else match[2]
    module, _, leaf = part.rpartition(".")
    place = modules.index(module)
    section = 1 if match is not None else 2 * (place > modules.index(TYPES))
    return section, int(match[1]) if match is not None else 0, place, "ab"[leaf == "bias"]


class NamesOfModel(NamedTuple):
    """How the names of one kind of model are read: `our_name`, and `module_order` of ours."""

    our_name: Callable[..., str | None]
    module_order: Callable[[str], tuple[int, int, int, str]]


NAMES = NamesOfModel(our_name, module_order)
"""Of a GPT or BERT."""


def is_beside_language_model(key: str) -> bool:
    """Return whether Megatron's parameter `key` is of a BERT head outside the trunk.

    In modules they come after all others, including the last stage's copy of the embedding; in
    files that copy comes last.
    """
    return key.startswith(_BERT_HEADS)


def is_parameter(key: str) -> bool:
    """Return whether an entry of a module's state is a parameter, not a computed value."""
    return _NOT_PARAMETERS.fullmatch(key) is None


def partition_of_name(name: str, *, gated: bool) -> Partition | None:
    """Return how our model splits the parameter `name` over tp ranks, as Megatron does too."""
    _, _, inside = name.partition("layers.")
    part = inside.partition(".")[2] if inside else name
    module = part.rpartition(".")[0]
    if part in (WORD, OUTPUT, WORD_BIAS) or module in _SPLIT_BY_HEADS:
        return Partition("tp", dim=0)
    if part in ("mlp.fc1.weight", "mlp.fc1.bias"):
        return Partition("tp", dim=0, blocks=2 if gated else 1)
    if part in ("attention.output.weight", "cross_attention.output.weight", "mlp.fc2.weight"):
        return Partition("tp", dim=1)
    return None


def has_vocabulary_rows(name: str) -> bool:
    """Return whether the rows of `name` are tokens, padded to a multiple of the tp size."""
    return name in (WORD, OUTPUT, WORD_BIAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    """The order in which Megatron keeps the rows of a matrix of several parts.

    `version` is `checkpoint_version`: query, key and value of a head are adjacent since 2.0;
    before, all queries came first (below 1.0), or the three alternated by channel (1.0).
    `gate_second`: a gated unit's activation is on its second half, as in bigscience. `head_width`:
    channels of one attention head.
    """

    version: float = 3.0
    head_width: int = 1
    gate_second: bool = False

    def moves(self, name: str) -> bool:
        """Return whether the rows of the parameter `name` are in another order than ours."""
        return (_num_projections(name) > 1 and self.version < 2) or (
            self.gate_second and ".mlp.fc1." in name
        )

    def sums(self, name: str) -> bool:
        """Return whether the parameter `name` is the sum of those of all tp ranks: never here."""
        return False

    def to_ours(self, name: str, local: Tensor) -> Tensor:
        """Return one tp rank's part of `name` with rows in our order; a view if it is the same."""
        count = _num_projections(name)
        if count > 1 and self.version < 2:
            rest = local.shape[1:]
            if self.version < 1:
                parts = local.reshape(count, -1, self.head_width, *rest)
                return parts.transpose(0, 1).reshape(local.shape)
            parts = local.reshape(-1, self.head_width, count, *rest)
            return parts.transpose(1, 2).reshape(local.shape)
        return self._swapped(name, local)

    def from_ours(self, name: str, local: Tensor) -> Tensor:
        """Undo `to_ours`; only for versions that are written, which are 2 and later."""
        assert self.version >= 2  # noqa: S101  # invariant: older versions are only read
        return self._swapped(name, local)

    def _swapped(self, name: str, local: Tensor) -> Tensor:
        if not self.gate_second or ".mlp.fc1." not in name:
            return local
        first, second = local.chunk(2, dim=0)
        return torch.cat([second, first])


def _num_projections(name: str) -> int:
    """Return how many of query, key and value the rows of the parameter `name` hold."""
    if ".attention.qkv." in name:
        return 3
    return 2 if ".cross_attention.key_value." in name else 1


def row_order(config: Mapping[str, Mapping[str, Any]], version: float = 3.0) -> RowOrder:
    """Return the row order in files of a model with these config groups (plain values)."""
    model = config.get("model", {})
    heads = int(model.get("num_attention_heads") or 1)
    width = int(model.get("kv_channels") or int(model.get("hidden_size") or heads) // heads)
    unit = model.get("glu_activation")
    return RowOrder(
        version=version,
        head_width=width,
        gate_second=unit is not None and not model.get("swiglu"),
    )


def is_gated(config: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether a model with these config groups (plain values) has a gated MLP."""
    model = config.get("model", {})
    return bool(model.get("swiglu")) or model.get("glu_activation") is not None
