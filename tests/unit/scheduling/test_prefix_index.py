"""Tests of megatron.scheduling.prefix_index."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.scheduling.prefix_index import PrefixEntry, PrefixIndex, PrefixRoot
from tests.support.examples import examples

ROOT = PrefixRoot(0)


def enter(index: PrefixIndex, root: PrefixRoot, *blocks: tuple[int, tuple[int, ...]]) -> None:
    """Enter blocks that follow each other."""
    parent: PrefixEntry | None = None
    for block, tokens in blocks:
        parent = index.insert(root, parent, tokens, block)


def matched(index: PrefixIndex, root: PrefixRoot, *tokens: int) -> list[int]:
    return [entry.block for entry in index.match(root, tokens)]


def test_the_longest_beginning_is_found_and_one_token_is_left() -> None:
    index = PrefixIndex(2)
    enter(index, ROOT, (5, (1, 2)), (6, (3, 4)))
    assert matched(index, ROOT, 1, 2, 3, 4, 9) == [5, 6]
    assert matched(index, ROOT, 1, 2, 3, 4) == [5]
    assert matched(index, ROOT, 1, 2, 4, 4, 9) == [5]
    assert matched(index, ROOT, 3, 4, 9) == []
    assert matched(index, ROOT, 1, 2) == []


@pytest.mark.parametrize("other", [PrefixRoot(1), PrefixRoot(0, b"salt")])
def test_other_weights_and_other_callers_have_other_entries(other: PrefixRoot) -> None:
    index = PrefixIndex(2)
    enter(index, ROOT, (5, (1, 2)))
    assert matched(index, other, 1, 2, 3) == []


def test_the_second_block_of_a_text_stands_for_the_first() -> None:
    index = PrefixIndex(2)
    first = index.insert(ROOT, None, (1, 2), 5)
    assert index.insert(ROOT, None, (1, 2), 7) is first
    assert 7 not in index


def test_equal_tokens_behind_other_tokens_are_another_block_whatever_their_hash_is() -> None:
    index = PrefixIndex(2, hash_function=lambda content: content[-8:])  # of these tokens alone
    enter(index, ROOT, (5, (1, 2)), (6, (3, 4)))
    enter(index, ROOT, (7, (0, 0)))
    assert matched(index, ROOT, 1, 2, 3, 4, 9) == [5, 6]
    assert matched(index, ROOT, 0, 0, 3, 4, 9) == [7]


def test_an_entry_leaves_with_all_that_follow_it() -> None:
    index = PrefixIndex(1)
    enter(index, ROOT, (5, (1,)), (6, (2,)), (7, (3,)))
    enter(index, ROOT, (5, (1,)), (8, (4,)))
    assert index.remove(6) == [6, 7]
    assert matched(index, ROOT, 1, 2, 3, 0) == [5]
    assert sorted(index.remove(5)) == [5, 8]
    assert len(index) == 0


def test_nothing_is_entered_behind_an_entry_that_left() -> None:
    index = PrefixIndex(1)
    first = index.insert(ROOT, None, (1,), 5)
    index.remove(5)
    assert index.insert(ROOT, first, (2,), 6) is None
    assert len(index) == 0


def test_the_secret_changes_every_key() -> None:
    entries = [PrefixIndex(1, secret=secret).insert(ROOT, None, (1,), 0) for secret in (b"a", b"b")]
    assert entries[0] is not None
    assert entries[1] is not None
    assert entries[0].key != entries[1].key


HASHES: list[Callable[[bytes], bytes] | None] = [
    None,
    lambda content: b"",
    lambda content: bytes((sum(content) % 3,)),
]
TEXTS = st.lists(st.integers(0, 2), max_size=7)


@pytest.mark.parametrize("hash_function", HASHES)
@examples(200)
@given(
    changes=st.lists(st.tuples(TEXTS, st.booleans(), st.integers(0, 3)), max_size=12), text=TEXTS
)
def test_whatever_collides_a_hit_has_the_text_that_was_entered(
    hash_function: Callable[[bytes], bytes] | None,
    changes: list[tuple[list[int], bool, int]],
    text: list[int],
) -> None:
    index = PrefixIndex(2, hash_function=hash_function)
    content: dict[int, tuple[PrefixRoot, tuple[int, ...]]] = {}
    for number, (tokens, salted, removed) in enumerate(changes):
        root = PrefixRoot(0, b"x" * salted)
        parent: PrefixEntry | None = None
        for end in range(2, len(tokens) + 1, 2):
            block = 10 * number + end
            parent = index.insert(root, parent, tuple(tokens[end - 2 : end]), block)
            if parent is None:
                break
            content.setdefault(parent.block, (root, tuple(tokens[:end])))
        if removed == 0 and content and (oldest := next(iter(content))) in index:
            index.remove(oldest)
    for root in (ROOT, PrefixRoot(0, b"x")):
        for place, entry in enumerate(index.match(root, text), start=1):
            assert content[entry.block] == (root, tuple(text[: 2 * place]))
