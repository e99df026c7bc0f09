"""Search against a sort of all scores, whatever the parts of an index are."""

from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from tests.support.examples import examples
from tools.retrieval import search as searching
from tools.retrieval.search import (
    search_blocks,
    search_by_faiss,
    search_exactly,
    way_of_search,
)


def naive(questions: torch.Tensor, blocks: torch.Tensor, count: int) -> list[list[int]]:
    """The places of the best blocks, of equal ones the first, by Python's stable sort."""
    return [
        sorted(range(len(blocks)), key=lambda at: -float(row[at]))[:count]
        for row in (questions @ blocks.t()).tolist()
    ]


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    rows=st.integers(1, 3),
    count=st.integers(1, 8),
    at_once=st.integers(1, 9),
    seed=st.integers(0, 99),
)
@examples(80)
def test_the_best_blocks_are_those_of_a_stable_sort(
    sizes: Sequence[int], rows: int, count: int, at_once: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Small whole numbers: many scores are equal, and all are exact.
    blocks = torch.randint(-1, 2, (sum(sizes), 3), generator=generator).float()
    questions = torch.randint(-1, 2, (rows, 3), generator=generator).float()
    with patch.object(searching, "SCORES_AT_ONCE", at_once):
        found = search_exactly(questions, blocks.split(list(sizes)), count=count)
    assert found.places.tolist() == naive(questions, blocks, count)
    expected = (questions @ blocks.t()).gather(1, found.places)
    assert torch.equal(found.scores, expected)


class FlatIndex:
    """What is used of faiss: a flat index of inner products."""

    def __init__(self, width: int) -> None:
        self.rows = np.empty((0, width), np.float32)

    @property
    def ntotal(self) -> int:
        return len(self.rows)

    def add(self, rows: Any) -> None:
        self.rows = np.concatenate([self.rows, rows])

    def search(self, questions: Any, count: int) -> tuple[Any, Any]:
        scores = questions @ self.rows.T
        places = np.argsort(-scores, axis=1)[:, :count]
        return np.take_along_axis(scores, places, axis=1), places


class Faiss:
    IndexFlatIP = FlatIndex


def test_faiss_finds_the_same_blocks() -> None:
    generator = torch.Generator().manual_seed(5)
    questions = torch.randn(4, 6, generator=generator)
    parts = [torch.randn(7, 6, generator=generator), torch.randn(2, 6, generator=generator)]
    for count in (3, 20):
        ours = search_exactly(questions, parts, count=count)
        theirs = search_by_faiss(questions, parts, count=count, faiss=Faiss)
        assert torch.equal(ours.places, theirs.places)
        torch.testing.assert_close(ours.scores, theirs.scores)


def test_faiss_is_used_where_it_is_installed() -> None:
    questions, parts = torch.eye(2), [torch.eye(2)]
    for absent in (None, ModuleSpec("faiss", None)):  # a folder of that name is no package
        with patch.object(searching.importlib.util, "find_spec", lambda name, it=absent: it):
            assert way_of_search().startswith("faiss is not installed: searching exactly")
            assert search_blocks(questions, parts, count=1).places.tolist() == [[0], [1]]
    there = ModuleSpec("faiss", None, origin="faiss/__init__.py")
    with (
        patch.object(searching.importlib.util, "find_spec", lambda name: there),
        patch.object(searching, "import_module", lambda name: Faiss),
    ):
        assert way_of_search() == "searching by a flat index of faiss"
        assert search_blocks(questions, parts, count=1).places.tolist() == [[0], [1]]


def test_a_search_for_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="a search asks for no block"):
        search_blocks(torch.eye(2), [torch.eye(2)], count=0)
