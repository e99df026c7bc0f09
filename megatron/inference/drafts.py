"""Tokens that are proposed for sequences, to be checked in the step that computes them.

Whatever is proposed, the tokens of a sequence are those that are drawn without proposals: right
ones save steps, wrong ones cost the computation of their rows.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron.inference.sampling import SequenceDraw
from megatron.scheduling.forward_plan import ForwardPlan

LONGEST_NGRAM = 4
SHORTEST_NGRAM = 2  # one token alone is followed by anything


class Drafter(Protocol):
    """Proposes tokens."""

    def propose(
        self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]
    ) -> Mapping[int, Sequence[int]]:
        """Return tokens by sequence, of the slices of a plan that have room for them.

        It is called for every plan, in the order in which they are executed.

        Args:
            draws: by sequence, of the slices that sample.
        """


class NgramDrafter:
    """Proposes what followed the last tokens of a sequence when they stood in it before."""

    def propose(
        self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]
    ) -> Mapping[int, Sequence[int]]:
        """Return tokens by sequence; see `Drafter`."""
        found: dict[int, Sequence[int]] = {}
        for part in plan.slices:
            if part.draft_room:
                draw = draws[part.sequence]
                found[part.sequence] = ngram_draft([*draw.prompt, *draw.output], part.draft_room)
        return found


def ngram_draft(tokens: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the `count` tokens that followed the last place where a text had its last tokens.

    The longest of `LONGEST_NGRAM` to `SHORTEST_NGRAM` last tokens that stand in it twice count;
    none are returned where not even the shortest do. A text that ends before `count` tokens is
    taken to go on in the same period (prompt lookup, https://github.com/apoorvumang/prompt-lookup-decoding).
    """
    text = array("q", tokens)
    size, spelled = text.itemsize, text.tobytes()
    for length in range(min(LONGEST_NGRAM, len(text) - 1), SHORTEST_NGRAM - 1, -1):
        last = spelled[-length * size :]
        at = spelled.rfind(last, 0, len(spelled) - size)
        while at % size and at >= 0:  # bytes of two tokens that look like one
            at = spelled.rfind(last, 0, at + len(last) - 1)
        if at >= 0:
            following = tokens[at // size + length :]
            return tuple(following[place % len(following)] for place in range(count))
    return ()
