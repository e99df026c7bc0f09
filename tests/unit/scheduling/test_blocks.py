"""Tests of megatron.scheduling.blocks."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megatron.scheduling.blocks import BlockError, BlockPool
from megatron.scheduling.prefix_index import PrefixIndex, PrefixRoot
from tests.support.examples import examples

ROOT = PrefixRoot(0)
SIZE = 6


def pool_of(size: int) -> BlockPool:
    return BlockPool(size, PrefixIndex(1))


def test_a_pool_gives_each_block_once_and_then_refuses() -> None:
    pool = pool_of(3)
    assert {pool.allocate() for _ in range(3)} == {0, 1, 2}
    with pytest.raises(BlockError, match="every block is in use"):
        pool.allocate()


def test_a_block_is_free_when_its_last_reader_gives_it_back() -> None:
    pool = pool_of(1)
    block = pool.allocate()
    pool.share(block)
    pool.release([block])
    assert pool.counts == (1, 0, 0)
    pool.release([block])
    assert pool.counts == (0, 0, 1)
    with pytest.raises(BlockError, match="released more often than it was taken"):
        pool.release([block])
    with pytest.raises(BlockError, match="a free block cannot be shared"):
        pool.share(block)


def test_the_block_that_was_used_longest_ago_is_evicted_and_of_one_text_its_end() -> None:
    pool = pool_of(3)
    texts = {}
    for number in range(2):
        text = [pool.allocate() for _ in range(1 + number)]
        parent = None
        for place, block in enumerate(text):
            parent = pool.index.insert(ROOT, parent, (10 * number + place,), block)
        texts[number] = text
    pool.release(texts[1])
    pool.release(texts[0])
    assert [pool.allocate() for _ in range(3)] == [*reversed(texts[1]), *texts[0]]


def test_a_cached_block_is_shared_again_and_is_not_evicted_then() -> None:
    pool = pool_of(2)
    block = pool.allocate()
    pool.index.insert(ROOT, None, (1,), block)
    pool.release([block])
    assert pool.counts == (0, 1, 1)
    pool.share(block)
    assert pool.allocate() != block
    assert pool.counts == (2, 0, 0)


def test_a_dropped_cache_is_free_and_readers_keep_their_blocks() -> None:
    pool = pool_of(3)
    cached, read = pool.allocate(), pool.allocate()
    first = pool.index.insert(ROOT, None, (1,), cached)
    pool.index.insert(ROOT, first, (2,), read)
    pool.release([cached])
    pool.drop_cached()
    assert pool.counts == (1, 0, 2)
    assert len(pool.index) == 0


class Pool(RuleBasedStateMachine):
    """A pool beside a list of the blocks that each reader holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(SIZE)
        self.held: list[int] = []  # a block stands here once for each reference
        self.next_text = 0

    @precondition(lambda self: self.pool.counts.available > 0)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert block not in self.held
        assert block not in self.pool.index
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release([block])

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        cached = [block for block in range(SIZE) if block in self.pool.index]
        if possible := sorted({*self.held, *cached}):
            block = data.draw(st.sampled_from(possible))
            self.pool.share(block)
            self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), behind=st.booleans())
    def enter(self, data: st.DataObject, behind: bool) -> None:
        block = data.draw(st.sampled_from(self.held))
        if block in self.pool.index:
            return
        self.next_text += 1
        entries = list(self.pool.index._by_block.values())
        parent = data.draw(st.sampled_from(entries)) if behind and entries else None
        self.pool.index.insert(ROOT, parent, (self.next_text,), block)

    @precondition(lambda self: len(self.pool.index))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.pool.forget(data.draw(st.sampled_from(sorted(self.pool.index._by_block))))

    @rule()
    def drop(self) -> None:
        self.pool.drop_cached()

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        assert [self.pool.references(block) for block in range(SIZE)] == [
            self.held.count(block) for block in range(SIZE)
        ]
        counts = self.pool.counts
        unread = set(range(SIZE)) - set(self.held)
        assert counts.referenced == len(set(self.held))
        assert counts.cached == sum(block in self.pool.index for block in unread)
        assert sum(counts) == SIZE

    @invariant()
    def the_entry_above_each_entry_is_in_the_index(self) -> None:
        for entry in self.pool.index._by_block.values():
            assert entry.is_indexed
            assert entry.parent is None or entry.parent.is_indexed


TestPool = Pool.TestCase
TestPool.settings = examples(100)


def test_blocks_whose_content_means_something_are_those_with_readers_and_the_cached() -> None:
    pool = BlockPool(4, PrefixIndex(2))
    assert pool.held == ()
    first, second = pool.allocate(), pool.allocate()
    assert pool.held == tuple(sorted((first, second)))
    pool.release([second])
    assert pool.held == (first,)
