"""One forward pass of an inference engine as data: which tokens of which sequences, and where
their keys and values are stored. The digest of a plan lets ranks compare what they would compute.
"""

import hashlib
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.errors import MegatronError

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence that one forward pass computes.

    Attributes:
        sequence: id of the sequence, unique in the life of an engine.
        tokens: ids to compute, at positions `start`, `start + 1`, ...
        start: position of the first of them.
        blocks: block table; covers positions 0 to `end + draft_room - 1`.
        samples: whether a token is drawn after the last one.
        prefix: tokens at the beginning that see each other, as the prompt of a prefix LM; they are
            computed in one pass.
        draft_room: how many tokens may be proposed behind `tokens`, and checked in the same pass;
            `with_drafts` puts them in.
        drafts: how many of the last `tokens` were proposed; a token is drawn after each of them.
        targets: the tokens at positions `start + 1`, `start + 2`, ... whose log-probabilities are
            wanted.
        top_targets: how many of the likeliest tokens are reported beside each target.
        embeds: whether the last hidden states of its tokens are wanted.
    """

    sequence: int
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    samples: bool
    prefix: int = 0
    draft_room: int = 0
    drafts: int = 0
    targets: tuple[int, ...] = ()
    top_targets: int = 0
    embeds: bool = False

    @property
    def end(self) -> int:
        """Position behind the last token: how many keys that token sees."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """One forward pass: block copies first, then all slices.

    Attributes:
        copies: pairs of source and target block, made in this order, or by reading all sources
            before a target is written. No block is a target twice.
        slices: the slices in the order in which they were planned, at most one of a sequence.
    """

    copies: tuple[tuple[int, int], ...] = ()
    slices: tuple[SequenceSlice, ...] = ()

    @property
    def token_count(self) -> int:
        """Tokens that are computed in this pass, at most."""
        return sum(len(part.tokens) + part.draft_room for part in self.slices)


def with_drafts(plan: ForwardPlan, drafts: Mapping[int, Sequence[int]]) -> ForwardPlan:
    """Return a plan that computes the proposed tokens of its sequences as well.

    Raises:
        MegatronError: a sequence has no room for its tokens.
    """
    room = {part.sequence: part.draft_room for part in plan.slices}
    for sequence, tokens in drafts.items():
        if len(tokens) > room.get(sequence, 0):
            raise MegatronError(
                "more tokens are proposed than a plan has room for",
                found=f"{len(tokens)} for sequence {sequence}, room for {room.get(sequence, 0)}",
                fix="report this as a bug of what proposes them",
            )
    slices = (_with_drafts(part, tuple(drafts.get(part.sequence, ()))) for part in plan.slices)
    return replace(plan, slices=tuple(slices))


def _with_drafts(part: SequenceSlice, tokens: tuple[int, ...]) -> SequenceSlice:
    if not part.draft_room:
        return part
    return replace(part, tokens=part.tokens + tokens, draft_room=0, drafts=len(tokens))


def plan_digest(plan: ForwardPlan) -> bytes:
    """Return 16 bytes that are equal for equal plans, in every process and on every machine."""
    numbers = array("q", (len(plan.copies), len(plan.slices)))
    for pair in plan.copies:
        numbers.extend(pair)
    for part in plan.slices:
        numbers.extend((part.sequence, part.start, part.samples, part.prefix, part.drafts))
        numbers.extend((part.top_targets, part.embeds))
        for values in (part.tokens, part.blocks, part.targets):
            numbers.append(len(values))
            numbers.extend(values)
    return hashlib.blake2b(_little_endian(numbers), digest_size=_DIGEST_BYTES).digest()


def _little_endian(numbers: "array[int]") -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
