"""Which full blocks hold the keys and values of which beginning of a text.

A block is found by a keyed hash of its tokens and of the block before it. The stored tokens are
compared on every hit, so a collision of hashes costs time and never correctness. The entries are a
tree: an entry is found only while the entry of the block before it is in the index.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

_KEY_BYTES = 16
HashFunction = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class PrefixRoot:
    """What texts must have in common before their tokens are compared.

    Attributes:
        weights_version: version of the weights that computed the keys and values.
        salt: separates callers who must not notice each other's texts by the time of an answer.
    """

    weights_version: int
    salt: bytes = b""


@dataclass(eq=False, slots=True)
class PrefixEntry:
    """A full block in the index.

    Attributes:
        key: hash of its tokens, its root and the key of its parent.
        root: what it has in common with every entry above it.
        parent: the entry of the block before it; None for the first block of a text.
        tokens: the ids in the block.
        block: the block of the pool that holds their keys and values.
        is_indexed: whether the index still has it.
        children: entries of blocks that follow it, by key.
    """

    key: bytes
    root: PrefixRoot
    parent: "PrefixEntry | None"
    tokens: tuple[int, ...]
    block: int
    is_indexed: bool = True
    children: dict[bytes, "PrefixEntry"] = field(default_factory=dict)

    def holds(
        self, root: PrefixRoot, parent: "PrefixEntry | None", tokens: tuple[int, ...]
    ) -> bool:
        """Return whether this is the entry of `tokens` behind `parent`."""
        return self.parent is parent and self.root == root and self.tokens == tokens


class PrefixIndex:
    """The entries of all full blocks that may be used again.

    Args:
        block_size: tokens in a block.
        secret: key of the hash, random for each process: nobody can choose texts that collide.
        hash_function: replaces the keyed hash, for tests of collisions.
    """

    def __init__(
        self, block_size: int, *, secret: bytes = b"", hash_function: HashFunction | None = None
    ) -> None:
        self._block_size, self._secret = block_size, secret
        self._hash = hash_function or self._keyed_hash
        self._by_key: dict[bytes, PrefixEntry] = {}
        self._by_block: dict[int, PrefixEntry] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def match(self, root: PrefixRoot, tokens: Sequence[int]) -> list[PrefixEntry]:
        """Return the entries of the longest beginning of `tokens` that is in the index.

        At least one token is left over: its scores are needed, and are not stored.
        """
        found: list[PrefixEntry] = []
        for start in range(0, len(tokens) - self._block_size, self._block_size):
            parent = found[-1] if found else None
            part = tuple(tokens[start : start + self._block_size])
            entry = self._by_key.get(self._key(root, parent, part))
            if entry is None or not entry.holds(root, parent, part):
                break
            found.append(entry)
        return found

    def insert(
        self, root: PrefixRoot, parent: PrefixEntry | None, tokens: tuple[int, ...], block: int
    ) -> PrefixEntry | None:
        """Enter `block`, which holds the keys and values of `tokens` behind `parent`.

        Returns:
            The entry of these tokens, which may be that of another block; None if the parent left
            the index, or if other tokens have the same hash.
        """
        if parent is not None and not parent.is_indexed:
            return None
        key = self._key(root, parent, tokens)
        if (present := self._by_key.get(key)) is not None:
            return present if present.holds(root, parent, tokens) else None
        entry = PrefixEntry(key, root, parent, tokens, block)
        self._by_key[key] = self._by_block[block] = entry
        if parent is not None:
            parent.children[key] = entry
        return entry

    def remove(self, block: int) -> list[int]:
        """Take the entry of `block` out, with all entries below it; return their blocks."""
        entry = self._by_block[block]
        if entry.parent is not None:
            entry.parent.children.pop(entry.key, None)
        removed = list(_with_descendants(entry))
        for one in removed:
            one.is_indexed = False
            del self._by_key[one.key], self._by_block[one.block]
        return [one.block for one in removed]

    def _key(self, root: PrefixRoot, parent: PrefixEntry | None, tokens: Sequence[int]) -> bytes:
        above = parent.key if parent is not None else b""
        version = root.weights_version.to_bytes(8, "little", signed=True)
        lengths = bytes((len(above),)) + len(root.salt).to_bytes(4, "little")
        content = above + version + root.salt + array("i", tokens).tobytes()
        return self._hash(lengths + content)

    def _keyed_hash(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, key=self._secret, digest_size=_KEY_BYTES).digest()


def _with_descendants(entry: PrefixEntry) -> Iterator[PrefixEntry]:
    rest = [entry]
    while rest:
        one = rest.pop()
        yield one
        rest += one.children.values()
