"""Which sequences of a step attend together, and how far their keys are padded: arithmetic.

Sequences of one token are read a few at a time, those of similar length together. Bits of attention
on CPUs depend on the number of queries below 4 and, in float32, on the number of keys in a block of
512: both can be padded, so that a sequence gets the same bits in any company.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.scheduling.forward_plan import SequenceSlice

# Measured on CPUs (AMD Zen 5, Intel with AVX-512, torch 2.13): the key split of the flash kernel in
# float32, what is enough in half precision, and the queries above which one has the same bits.
KEY_MULTIPLE = 512
HALF_KEY_MULTIPLE = 32
ROW_MULTIPLE = 4
MOST_SEQUENCES = 8
MOST_KEYS = 8192  # read together: the copies of a few heads stay in the cache of a core


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Slices of equally many tokens whose keys are read together.

    Attributes:
        slices: places in the plan.
        tokens: of each slice.
        keys: of each slice, with padding.
    """

    slices: tuple[int, ...]
    tokens: int
    keys: int


def attention_groups(
    slices: Sequence[SequenceSlice], *, block_size: int, key_multiple: int
) -> tuple[AttentionGroup, ...]:
    """Return groups that hold every slice once: those of one token first, by length.

    Longer slices are groups of their own. Keys are whole blocks, and a multiple of `key_multiple`.
    """
    multiple = math.lcm(key_multiple, block_size)
    single = [place for place, each in enumerate(slices) if len(each.tokens) == 1]
    single.sort(key=lambda place: slices[place].end)
    groups: list[AttentionGroup] = []
    members: list[int] = []
    for place in single:
        keys = padded_to(slices[place].end, multiple)  # the longest so far
        if members and (len(members) == MOST_SEQUENCES or (len(members) + 1) * keys > MOST_KEYS):
            groups.append(_group(members, slices, multiple))
            members = []
        members.append(place)
    if members:
        groups.append(_group(members, slices, multiple))
    several = (place for place, each in enumerate(slices) if len(each.tokens) > 1)
    return (*groups, *(_group([place], slices, multiple) for place in several))


def padded_to(number: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


def _group(
    members: Sequence[int], slices: Sequence[SequenceSlice], multiple: int
) -> AttentionGroup:
    longest = max(slices[place].end for place in members)
    tokens = len(slices[members[0]].tokens)
    return AttentionGroup(tuple(members), tokens, padded_to(longest, multiple))
