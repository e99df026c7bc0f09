"""Where parameters lie in a flat buffer, which of them are reduced together, and who owns what.

Arithmetic over numbers of elements. The plan depends on nothing but those numbers and the number
of shards, so that all ranks make the same one, whether or not gradients are sharded.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

ALIGN_ELEMENTS = 64  # 128 bytes or more, for vectorised kernels at the start of every parameter


def default_bucket_elements(shards: int) -> int:
    """Return the default elements of a bucket, a trade of bandwidth against overlap.

    The numbers are Megatron's. With many shards it is more, so that messages stay long.
    """
    return max(40_000_000, 1_000_000 * shards)


class ReductionTime(Enum):
    """When a parameter's gradient may be reduced, which decides which others share its bucket."""

    PROMPT = "as soon as its last micro-batch is done"
    HELD = "at the end of the step: it is summed over other ranks first, or may have no gradient"
    ALONE = "as HELD, in a bucket that has the same place on every pipeline stage that holds it"


class ElementRange(NamedTuple):
    """Elements [start, stop) of a flat buffer, or of a flattened parameter."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Bucket(NamedTuple):
    """A range of whole parameters and padding that is reduced in one collective."""

    range: ElementRange
    members: tuple[int, ...]  # indexes of its parameters, in the order in which they lie there
    held: bool  # until the end of the step

    def share(self, index: int, size: int) -> ElementRange:
        """Return part `index` of `size` equal parts of the bucket, in flat-buffer elements."""
        length = self.range.size // size
        start = self.range.start + index * length
        return ElementRange(start, start + length)


class FlatPlan(NamedTuple):
    """The layout of one flat buffer."""

    places: tuple[ElementRange, ...]  # of every parameter, in the order in which they were given
    buckets: tuple[Bucket, ...]  # one after the other, without gaps; held ones last

    @property
    def elements(self) -> int:
        """Length of the buffer, padding included."""
        return self.buckets[-1].range.stop


def plan_flat(
    counts: Sequence[int], turns: Sequence[ReductionTime], *, shards: int, bucket_elements: int
) -> FlatPlan:
    """Lay out parameters of `counts` elements, in the reverse of the order given.

    That is roughly the order of the backward pass: buckets fill up one after the other, and one is
    reduced while the next is computed. A bucket ends with the parameter that brings it to
    `bucket_elements`, and is padded to `shards` equal parts that start at aligned elements.
    """
    unit = shards * ALIGN_ELEMENTS
    places = [ElementRange(0, 0)] * len(counts)
    buckets: list[Bucket] = []
    start = 0
    for turn in (ReductionTime.PROMPT, ReductionTime.HELD, ReductionTime.ALONE):
        left = [index for index in reversed(range(len(counts))) if turns[index] is turn]
        members: list[int] = []
        stop = start
        for index in left:
            places[index] = ElementRange(stop, stop + counts[index])
            stop += _round_up(counts[index], ALIGN_ELEMENTS)
            members.append(index)
            if turn is ReductionTime.ALONE or stop - start >= bucket_elements or index == left[-1]:
                stop = start + _round_up(stop - start, unit)
                buckets.append(
                    Bucket(
                        ElementRange(start, stop), tuple(members), turn is not ReductionTime.PROMPT
                    )
                )
                members, start = [], stop
    return FlatPlan(tuple(places), tuple(buckets))


def owned_ranges(plan: FlatPlan, index: int, size: int) -> tuple[ElementRange, ...]:
    """Return for each parameter its flattened elements that shard `index` of `size` owns.

    Over all shards every element has one owner. Ranges start at multiples of `ALIGN_ELEMENTS`; they
    are empty, at 0, where nothing is owned.
    """
    owned = [ElementRange(0, 0)] * len(plan.places)
    for bucket in plan.buckets:
        share = bucket.share(index, size)
        for member in bucket.members:
            place = plan.places[member]
            start, stop = max(place.start, share.start), min(place.stop, share.stop)
            if start < stop:
                owned[member] = ElementRange(start - place.start, stop - place.start)
    return tuple(owned)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
