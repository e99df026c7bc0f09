"""The blocks of a paged cache: who refers to which, which are free, which are kept for later texts.

A block is in exactly one of three states: referred to by sequences, cached (full, in the prefix
index, and referred to by nobody) or free. The bytes of a block are the engine's.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatron.errors import MegatronError
from megatron.scheduling.prefix_index import PrefixIndex


class BlockError(MegatronError):
    """The pool of blocks was used against its rules: a bug of the caller."""


class BlockCounts(NamedTuple):
    """How many blocks are in each state; together they are the pool."""

    referenced: int
    cached: int
    free: int

    @property
    def available(self) -> int:
        """Blocks that an allocation can take."""
        return self.cached + self.free


class BlockPool:
    """Reference counts of all blocks, and the prefix index of the full ones.

    Args:
        size: blocks in the pool.
        index: finds full blocks by their content.
    """

    def __init__(self, size: int, index: PrefixIndex) -> None:
        self.size, self.index = size, index
        self._free = list(range(size - 1, -1, -1))  # a stack: the last one is taken first
        self._references: dict[int, int] = {}
        self._cached: dict[int, None] = {}  # in the order of their last use, the oldest first

    @property
    def counts(self) -> BlockCounts:
        """How many blocks are in each state."""
        return BlockCounts(len(self._references), len(self._cached), len(self._free))

    @property
    def held(self) -> tuple[int, ...]:
        """Blocks whose content means something: those that are referred to, and the cached."""
        return (*sorted(self._references), *sorted(self._cached))

    def references(self, block: int) -> int:
        """Return how many sequences refer to a block."""
        return self._references.get(block, 0)

    def allocate(self) -> int:
        """Return a block with one reference; the cached block used longest ago, if none is free.

        Raises:
            BlockError: every block is referred to.
        """
        if not self._free:
            self._evict()
        block = self._free.pop()
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block that is referred to, or cached.

        Raises:
            BlockError: the block is free, so that its content means nothing.
        """
        if block not in self._references and block not in self._cached:
            raise BlockError(
                "a free block cannot be shared",
                found=f"block {block} of {self.size}",
                fix="report this as a bug of the scheduler",
            )
        self._cached.pop(block, None)
        self._references[block] = self._references.get(block, 0) + 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one reference from each block; the last blocks of a text are evicted first.

        Raises:
            BlockError: a block is not referred to.
        """
        for block in reversed(blocks):
            count = self._references.get(block, 0)
            if count == 0:
                raise BlockError(
                    "a block is released more often than it was taken",
                    found=f"block {block} of {self.size}",
                    fix="report this as a bug of the scheduler",
                )
            if count > 1:
                self._references[block] = count - 1
                continue
            del self._references[block]
            if block in self.index:
                self._cached[block] = None
            else:
                self._free.append(block)

    def forget(self, block: int) -> None:
        """Take a block out of the index, with all that follow it, because it will change."""
        for removed in self.index.remove(block):
            if removed in self._cached:
                del self._cached[removed]
                self._free.append(removed)

    def drop_cached(self) -> None:
        """Empty the index. Blocks that nobody refers to become free; others keep their readers."""
        for block in [*self._cached, *self._references]:
            if block in self.index:
                self.forget(block)

    def _evict(self) -> None:
        if not self._cached:
            raise BlockError(
                "every block is in use",
                found=f"{self.size} blocks, all referred to",
                fix="report this as a bug of the scheduler",
            )
        self.forget(next(iter(self._cached)))
