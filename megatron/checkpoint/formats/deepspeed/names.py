"""Maps Megatron-DeepSpeed's names in DeepSpeed's files to our parameters.

A plain model has Megatron's own names. In a pipeline they begin with the layer's number in
DeepSpeed's list, which also counts functions, so that block 0 is number 2 or 3 depending on the
fork; tied modules are under `tied_modules`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.checkpoint.bert_tensors import WORD_BIAS
from megatron.checkpoint.formats.deepspeed import neox
from megatron.checkpoint.formats.deepspeed.parameters import KnownParameter
from megatron.checkpoint.formats.megatron.names import (
    BLOCK,
    EDGES,
    WORD,
    has_vocabulary_rows,
    is_gated,
    our_name,
    partition_of_name,
)
from megatron.errors import CheckpointError

_PREFIXES = ("module.", "model.", "language_model.")
_TIED = re.compile(r"tied_modules\.[^.]+\.(.+)")
_NUMBERED = re.compile(r"(\d+)\.(.+)")
_NUMBERED_NAMES: Mapping[str, str] = {
    "weight": "final_norm.weight",
    "bias": "final_norm.bias",
    "lm_head.weight": "output.weight",
}
_SHOWN = 5


def known_parameters(
    names: Iterable[str],
    config: Mapping[str, Mapping[str, Any]],
    vocab_rows: int | None,
    *,
    is_neox: bool = False,
) -> dict[str, KnownParameter]:
    """Return our parameters by the names of Megatron-DeepSpeed, of all ranks together.

    Args:
        is_neox: they are gpt-neox's names instead.
        config: groups of plain values, which give whether the MLP is gated.
        vocab_rows: the number of tokens; None: unknown, so no row is treated as padding.

    Raises:
        CheckpointError: names that are not of a GPT or BERT of that family.
    """
    names = list(names)
    if is_neox:
        first = neox.first_neox_block(names)
        found = {name: neox.neox_to_ours(name, first) for name in names}
    else:
        first = first_block(names)
        found = {name: _ours(name, first) for name in names}
    unknown = [name for name, global_name in found.items() if global_name is None]
    if unknown:
        rest = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise CheckpointError(
            "the checkpoint has parameters that this program does not know",
            found=", ".join(unknown[:_SHOWN]) + rest,
            fix="only checkpoints of this program, of Megatron-DeepSpeed's GPT or BERT and of "
            "gpt-neox's plain layers are read",
        )
    gated, hidden = is_gated(config), config.get("model", {}).get("hidden_size")
    result = {}
    for name, global_name in found.items():
        assert global_name is not None  # noqa: S101  # invariant: refused above
        rows = vocab_rows if has_vocabulary_rows(global_name) else None
        result[name] = KnownParameter(
            global_name,
            partition_of_name(global_name, gated=gated),
            shape=_shape(global_name, rows, hidden),
            tied=global_name == WORD,
        )
    return result


def _shape(ours: str, rows: int | None, hidden: int | None) -> tuple[int, ...] | None:
    """Return the whole shape of a parameter with a row for each token; None for all others."""
    if rows is None:
        return None
    if ours == WORD_BIAS:
        return (rows,)
    return None if hidden is None else (rows, hidden)


def first_block(names: Iterable[str]) -> int:
    """Return the index of block 0 in DeepSpeed's list of layers; 0 if there is none."""
    found = [_NUMBERED.fullmatch(name) for name in names]
    return min((int(match[1]) for match in found if match and match[2] in BLOCK), default=0)


def _ours(name: str, first: int) -> str | None:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    if match := _TIED.fullmatch(name):
        return EDGES.get(f"embedding.{match[1]}")
    if match := _NUMBERED.fullmatch(name):
        number, rest = int(match[1]), match[2]
        if rest in BLOCK:
            return f"layers.{number - first}.{BLOCK[rest]}"
        return _NUMBERED_NAMES.get(rest) or EDGES.get(f"embedding.{rest}")
    return our_name(name)
