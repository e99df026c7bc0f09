"""Which layers of the list each pipeline stage holds: contiguous ranges, arithmetic only.

Ranges stand in the order of the model, one per virtual stage: number `chunk * num_stages + stage`
is the part `chunk` of `stage`. Layers are the specs of a model's list, so that embedding, final
norm and head count too; `blocks` is the range of the transformer layers that flags count.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite, lcm
from typing import NamedTuple

from megatron.errors import ConfigError


class LayerRange(NamedTuple):
    """The layers [start, stop) of a model's list."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of layers."""
        return self.stop - self.start


def plan_stages(
    costs: Sequence[float],
    num_stages: int,
    *,
    num_chunks: int = 1,
    blocks: LayerRange | None = None,
) -> tuple[LayerRange, ...]:
    """Return the cut into virtual stages with the smallest maximal cost; exact.

    Among such cuts the one with the smallest sum of squares, which is the most even; then the one
    whose early stages are shorter, since those keep the most activations.

    Args:
        costs: of every layer, in any unit: parameters, floating-point operations, measured time.
        num_stages: pipeline-parallel ranks.
        num_chunks: virtual stages on each rank.
        blocks: every virtual stage gets one of these at least, where there are enough; None: any
            layer will do.

    Raises:
        ConfigError: fewer layers than virtual stages, or a cost that is no number from 0.
    """
    virtual = num_stages * num_chunks
    bad = [cost for cost in costs if not isfinite(cost) or cost < 0]
    if bad:
        raise ConfigError(
            "a layer's cost is not a number from 0",
            found=f"{bad[0]} among the costs of {len(costs)} layers",
            fix="give every layer a cost of 0 or more",
        )
    if len(costs) < virtual:
        raise _too_few_layers(len(costs), num_stages, num_chunks)
    if blocks is None or blocks.size < virtual:
        blocks = LayerRange(0, len(costs))
    sums = (0, *accumulate(_whole_numbers(costs)))
    bottleneck = _best_cut(sums, virtual, blocks, squares=False, limit=sums[-1]).value
    # The sum of squares alone may prefer a larger maximum, so the maximum is a limit here.
    return _best_cut(sums, virtual, blocks, squares=True, limit=bottleneck).ranges


def even_counts(
    num_blocks: int,
    num_stages: int,
    *,
    num_chunks: int = 1,
    first: int | None = None,
    last: int | None = None,
) -> tuple[int, ...]:
    """Return the number of transformer layers of each virtual stage, as even as possible.

    What does not divide evenly goes to stages in the middle first: the ends have the embedding and
    the head besides.

    Args:
        num_blocks: transformer layers of the model.
        num_stages: pipeline-parallel ranks.
        num_chunks: virtual stages on each rank.
        first: layers of the first rank, shared out over its chunks; None: as the others.
        last: the same of the last rank.

    Raises:
        ConfigError: a virtual stage would be left without a layer, or chunks of one rank unequal.
    """
    given = {rank: n for rank, n in ((0, first), (num_stages - 1, last)) if n is not None}
    if first is not None and last is not None and num_stages == 1:
        raise ConfigError(
            "one stage is both the first and the last",
            found=f"--decoder-first-pipeline-num-layers {first}, "
            f"--decoder-last-pipeline-num-layers {last}, --pipeline-model-parallel-size 1",
            fix="drop both flags, or use more stages",
        )
    left = num_blocks - sum(given.values())
    others = num_chunks * (num_stages - len(given))
    if left < others or (left and not others):
        raise ConfigError(
            "the layers do not fill the pipeline stages",
            found=_counts_found(num_blocks, num_stages, num_chunks, first, last),
            fix=f"leave at least {others} layers to the other stages"
            if others
            else f"use --num-layers {sum(given.values())}, or other counts",
        )
    counts = [0] * (num_stages * num_chunks)
    for rank, count in given.items():
        counts[rank::num_stages] = [_per_chunk(count, num_chunks)] * num_chunks
    free = [at for at in range(len(counts)) if at % num_stages not in given]
    middle_first = sorted(free, key=lambda at: (-min(at, len(counts) - 1 - at), at))
    for place, at in enumerate(middle_first):
        counts[at] = left // others + (place < left % others)
    return tuple(counts)


def listed_counts(
    counts: Sequence[int], num_blocks: int, num_stages: int, *, num_chunks: int = 1
) -> tuple[int, ...]:
    """Return explicit numbers of transformer layers, as one per virtual stage.

    Args:
        counts: one per rank, shared out evenly over its chunks, or one per virtual stage in the
            order of the model.
        num_blocks: transformer layers of the model.
        num_stages: pipeline-parallel ranks.
        num_chunks: virtual stages on each rank.

    Raises:
        ConfigError: the wrong number of counts, a count below 1, or another sum than `num_blocks`.
    """
    found = f"--pipeline-layer-counts {' '.join(map(str, counts))}"
    virtual = num_stages * num_chunks
    if len(counts) not in (num_stages, virtual):
        also = f" or {virtual} (virtual stages)" if num_chunks > 1 else ""
        raise ConfigError(
            "the counts of layers are not one per pipeline stage",
            found=f"{found}, --pipeline-model-parallel-size {num_stages}",
            fix=f"give {num_stages}{also} of them",
        )
    if any(count < 1 for count in counts):
        raise ConfigError(
            "a pipeline stage would have no layer", found=found, fix="give every stage one or more"
        )
    if sum(counts) != num_blocks:
        raise ConfigError(
            "the counts of layers do not add up to the layers of the model",
            found=f"{found} (together {sum(counts)}), --num-layers {num_blocks}",
            fix=f"give counts that add up to {num_blocks}, or use --num-layers {sum(counts)}",
        )
    if len(counts) == virtual:
        return tuple(counts)
    return tuple(_per_chunk(count, num_chunks) for count in counts) * num_chunks


def ranges_of_counts(
    counts: Sequence[int], *, ends: Sequence[int], num_layers: int
) -> tuple[LayerRange, ...]:
    """Return ranges of the whole list, from the transformer layers of each virtual stage.

    What stands before the transformer layers goes to the first stage, what follows to the last.

    Args:
        ends: for each transformer layer, where a stage of which it is the last one ends.
        num_layers: layers of the whole list.
    """
    assert sum(counts) == len(ends), counts  # noqa: S101  # invariant: counts are of these blocks
    cuts = [ends[n - 1] for n in accumulate(counts)]
    return tuple(
        LayerRange(start, stop) for start, stop in zip((0, *cuts[:-1]), (*cuts[:-1], num_layers))
    )


def ranges_of_stage(
    ranges: Sequence[LayerRange], stage: int, num_stages: int
) -> tuple[LayerRange, ...]:
    """Return the ranges of one rank, chunk by chunk."""
    return tuple(ranges[stage::num_stages])


def holders(tied: Sequence[str | None], ranges: Sequence[LayerRange]) -> dict[str, tuple[int, ...]]:
    """Return the virtual stages that hold each shared module, from its first user to its last.

    Args:
        tied: for every layer of the list, the module whose weights it shares; None: it has its own.
        ranges: of every virtual stage.
    """
    found: dict[str, list[int]] = {}
    for at, (start, stop) in enumerate(ranges):
        for name in dict.fromkeys(tied[start:stop]):
            if name is not None:
                found.setdefault(name, []).append(at)
    return {name: tuple(stages) for name, stages in found.items()}


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """Scale the costs to integers, so that sums in another order are equal."""
    ratios = [cost.as_integer_ratio() for cost in costs]
    unit = lcm(*(denominator for _, denominator in ratios))
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


class _Cut(NamedTuple):
    value: int
    ranges: tuple[LayerRange, ...]


def _best_cut(
    sums: Sequence[int], parts: int, blocks: LayerRange, *, squares: bool, limit: int
) -> _Cut:
    """Find by dynamic programming from the end the best cut of layers from i into k parts.

    The value of a cut is its largest part, or the sum of its squared parts, none above `limit`.
    """
    count = len(sums) - 1
    best: list[int | None] = [None] * count + [0]  # None: there is no such cut
    chosen: list[list[int]] = []  # for each number of parts, where the first part from i stops
    for part in range(1, parts + 1):
        row: list[int | None] = [None] * (count + 1)
        stops = [count] * (count + 1)
        for start in range(count - part, -1, -1):
            for stop in range(start + 1, count - part + 2):
                rest, cost = best[stop], sums[stop] - sums[start]
                if rest is None or min(stop, blocks.stop) <= max(start, blocks.start):
                    continue  # nothing follows that works, or no transformer layer is in it
                if cost > limit:
                    break
                value, known = cost * cost + rest if squares else max(cost, rest), row[start]
                if known is None or value < known:  # the shortest first part among equals
                    row[start], stops[start] = value, stop
        best = row
        chosen.append(stops)
    assert best[0] is not None  # noqa: S101  # invariant: there are enough layers, none above limit
    at, ranges = 0, []
    for stops in reversed(chosen):
        ranges.append(LayerRange(at, stops[at]))
        at = stops[at]
    return _Cut(best[0], tuple(ranges))


def _per_chunk(count: int, num_chunks: int) -> int:
    if count < num_chunks or count % num_chunks:
        raise ConfigError(
            "the layers of a pipeline stage cannot be shared out evenly over its virtual stages",
            found=f"{count} layers, {num_chunks} virtual stages on the rank",
            fix=f"use {max(1, count // num_chunks) * num_chunks} layers there",
        )
    return count // num_chunks


def _too_few_layers(num_layers: int, num_stages: int, num_chunks: int) -> ConfigError:
    virtual = f" x {num_chunks} virtual stages" if num_chunks > 1 else ""
    return ConfigError(
        "there are fewer layers than pipeline stages to hold them",
        found=f"{num_layers} layers, --pipeline-model-parallel-size {num_stages}{virtual}",
        fix=f"use at least {num_stages * num_chunks} layers, or fewer stages",
    )


def _counts_found(
    num_blocks: int, num_stages: int, num_chunks: int, first: int | None, last: int | None
) -> str:
    parts = [f"--num-layers {num_blocks}", f"--pipeline-model-parallel-size {num_stages}"]
    if num_chunks > 1:
        parts.append(f"{num_chunks} virtual stages on each rank")
    if first is not None:
        parts.append(f"--decoder-first-pipeline-num-layers {first}")
    if last is not None:
        parts.append(f"--decoder-last-pipeline-num-layers {last}")
    return ", ".join(parts)
