"""Which tokens of a sequence a rank holds, and which of them meet in attention: arithmetic only.

Under a causal mask late tokens see more keys than early ones. So where attention is computed for
a rank's own queries, a sequence is cut into 2 cp chunks, and rank r holds chunks r and
2 cp - 1 - r: all ranks then compute equally much (Brandon et al. 2023, arXiv 2311.09431, has the
problem; Megatron-LM and Llama 3, arXiv 2407.21783 section 3.3.2, this answer). Where ranks exchange
heads for tokens, rank r holds tokens r s/cp and following.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SequenceShare:
    """The tokens that rank `rank` of `size` holds of every sequence.

    Args:
        paired: two chunks, an early one and a late one; else one.
    """

    rank: int = 0
    size: int = 1
    paired: bool = False

    @property
    def parts(self) -> int:
        """The number of equal parts that a sequence is cut into."""
        return self.size * (2 if self.paired and self.size > 1 else 1)

    def of_rank(self, rank: int) -> "SequenceShare":
        """Return the share of another rank of the same group."""
        return replace(self, rank=rank)

    def slices(self, length: int) -> tuple[slice, ...]:
        """Return the own chunks of `length` tokens, in the order of the sequence.

        Raises:
            ConfigError: the sequence does not divide into equal chunks.
        """
        chunk, rest = divmod(length, self.parts)
        if rest:
            raise ConfigError(
                "a sequence cannot be shared out evenly over the context-parallel ranks",
                found=f"{length} tokens in {self.parts} parts over {self.size} ranks",
                fix=f"use sequences of a multiple of {self.parts} tokens, such as "
                f"{length - rest + self.parts}",
            )
        chunks = (self.rank, self.parts - 1 - self.rank) if self.parts > self.size else (self.rank,)
        return tuple(slice(at * chunk, (at + 1) * chunk) for at in chunks)

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Return the own tokens of a tensor whose dimension `dim` is the whole sequence."""
        if self.size == 1:
            return whole
        chunks = [
            whole.narrow(dim, part.start, part.stop - part.start)
            for part in self.slices(whole.shape[dim])
        ]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=dim)

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return the indexes of the own tokens in a sequence of `length`: int64 [length / size]."""
        return self.take(torch.arange(length, device=device), 0)

    def gathered_positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return the indexes of all tokens in the order of ranks: int64 [length]."""
        every = (self.of_rank(rank) for rank in range(self.size))
        return torch.cat([share.positions(length, device) for share in every])


class KeyBlock(NamedTuple):
    """A part of the own queries, and the keys of one rank that they may see.

    Slices are of the rank's own tokens, in the order in which it holds them. Where `causal` is
    set, queries and keys are the same tokens, and a query sees keys up to its own.
    """

    source: int
    queries: slice
    keys: slice
    causal: bool


def key_blocks(share: SequenceShare, tokens: int, *, causal: bool) -> Iterator[KeyBlock]:
    """Yield the blocks of attention of one rank, its own keys first, then those of ranks before it.

    Under a causal mask a rank sees the early chunk of every earlier rank with both of its own, and
    both chunks of every later rank with its late one alone.

    Args:
        share: the rank's; paired if `causal`.
        tokens: how many tokens a rank holds.
    """
    every, half = slice(0, tokens), tokens // 2
    yield KeyBlock(share.rank, every, every, causal)
    for steps in range(1, share.size):
        source = (share.rank - steps) % share.size
        if not causal:
            yield KeyBlock(source, every, every, False)
        elif source < share.rank:
            yield KeyBlock(source, every, slice(0, half), False)
        else:
            yield KeyBlock(source, slice(half, tokens), every, False)
