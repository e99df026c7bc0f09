"""The blocks with the largest inner products, exactly, in bounded memory.

Of equal scores the block that stands first in the index comes first, whatever the sizes of the
parts are. faiss, where it is installed, searches the same way and may order equal scores otherwise.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.errors import ConfigError

SCORES_AT_ONCE = 1 << 24  # numbers, 64 MiB in fp32


class Found(NamedTuple):
    """The best blocks of each question, best first."""

    scores: Tensor  # fp32 [q, k]
    places: Tensor  # int64 [q, k], in the index


def search_blocks(questions: Tensor, blocks: Iterable[Tensor], *, count: int) -> Found:
    """Return the `count` best blocks of each question, all of them if there are fewer.

    Args:
        questions: fp32 [q, e].
        blocks: fp32 [n, e] each, the parts of an index in order.

    Raises:
        ConfigError: no block is asked for.
    """
    if count < 1:
        raise ConfigError(
            "a search asks for no block",
            found=f"--faiss-topk-retrievals {count}",
            fix="use --faiss-topk-retrievals 100",
        )
    if _has_faiss():
        return search_by_faiss(questions, blocks, count=count, faiss=import_module("faiss"))
    return search_exactly(questions, blocks, count=count)


def way_of_search() -> str:
    """Return how `search_blocks` finds blocks here, for the log."""
    if _has_faiss():
        return "searching by a flat index of faiss"
    return "faiss is not installed: searching exactly by products of matrices"


def search_exactly(questions: Tensor, blocks: Iterable[Tensor], *, count: int) -> Found:
    """Return the best blocks by products of matrices, as `search_blocks`."""
    best = Found(questions.new_empty((len(questions), 0)), torch.empty((len(questions), 0)).long())
    start = 0
    for part in _pieces(blocks, max(1, SCORES_AT_ONCE // max(1, len(questions)))):
        places = torch.arange(start, start + len(part)).expand(len(questions), -1)
        scores = torch.cat([best.scores, questions @ part.t()], dim=1)
        best = _best(scores, torch.cat([best.places, places], dim=1), count)
        start += len(part)
    return best


def search_by_faiss(
    questions: Tensor, blocks: Iterable[Tensor], *, count: int, faiss: Any
) -> Found:
    """Return the best blocks by a flat index of faiss, as `search_blocks`."""
    index = faiss.IndexFlatIP(questions.shape[1])
    for part in blocks:
        index.add(part.contiguous().numpy())
    scores, places = index.search(questions.contiguous().numpy(), min(count, index.ntotal))
    return Found(torch.from_numpy(scores), torch.from_numpy(places))


def _has_faiss() -> bool:
    found = importlib.util.find_spec("faiss")
    return found is not None and found.origin is not None  # a mere folder of that name has none


def _pieces(blocks: Iterable[Tensor], rows: int) -> Iterator[Tensor]:
    for part in blocks:
        for start in range(0, len(part), rows):
            yield part[start : start + rows]


def _best(scores: Tensor, places: Tensor, count: int) -> Found:
    """Return the `count` largest scores; of equal ones those of the first columns."""
    if scores.shape[1] > count:
        values, at = scores.topk(count, dim=1)
        is_tied = (scores >= values[:, -1:]).sum(1) > count  # which it takes is left to torch
        if is_tied.any():
            at = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
        at = at.sort(dim=1).values
        scores, places = scores.gather(1, at), places.gather(1, at)
    order = scores.sort(dim=1, descending=True, stable=True)
    return Found(order.values, places.gather(1, order.indices))
