"""Maps the rows of our tensors to Hugging Face's: a rule makes strips of rows.

The two differ only in the order and grouping of whole rows (or, where Hugging Face keeps a matrix
transposed, of whole columns there): the order of heads, and which matrices are stored as one. So
one value, the strip, is used for reading and writing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megatron.checkpoint.boxes import Box
from megatron.config.model import ModelConfig
from megatron.config.models.vision import VisionConfig


class Strip(NamedTuple):
    """Rows [start, start + rows) of our tensor are rows [at, at + rows) of the file's `key`."""

    start: int
    rows: int
    key: str
    at: int


class TensorRule(Protocol):
    """Where the rows of one of our tensors are; `{}` in a key stands for the layer."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the tensors in files, in the order that `strips` expects."""

    @property
    def transposed(self) -> bool:
        """Whether files keep them as [in, out]."""

    def strips(self, config: ModelConfig, rows: int, keys: tuple[str, ...]) -> Iterator[Strip]:
        """Yield strips with each of the `rows` rows once, in our order, of the filled-in `keys`."""


@dataclass(frozen=True)
class Same:
    """The whole of one tensor, but for its first rows if `skipped` of them are none of ours.

    `transposed` if files keep it as [in, out]. Files hold our values less `less`: gains less 1.
    """

    key: str
    transposed: bool = False
    skipped: int = 0
    less: float = 0.0

    @property
    def keys(self) -> tuple[str, ...]:
        """The one key."""
        return (self.key,)

    def strips(self, config: ModelConfig, rows: int, keys: tuple[str, ...]) -> Iterator[Strip]:
        """Yield one strip."""
        yield Strip(0, rows, keys[0], self.skipped)


@dataclass(frozen=True)
class Reshaped:
    """The whole of one tensor, whose dimensions files keep in another way.

    Either with so many dimensions of 1 before ours, or (without any) as the weights of a
    convolution over patches, [out, channels, patch, patch].
    """

    key: str
    ones: int = 0
    transposed: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The one key."""
        return (self.key,)

    def strips(self, config: ModelConfig, rows: int, keys: tuple[str, ...]) -> Iterator[Strip]:
        """Yield one strip of all rows, which says nothing of their shape: see `their_shape`."""
        yield Strip(0, rows, keys[0], 0)

    def their_shape(self, shape: tuple[int, ...], vision: VisionConfig) -> tuple[int, ...]:
        """Return the shape in files of our tensor of `shape`."""
        if self.ones:
            return (1,) * self.ones + shape
        return (shape[0], vision.num_channels, vision.patch_dim, vision.patch_dim)


@dataclass(frozen=True)
class SavedTwice:
    """The whole of one tensor, which an untied model has under a second key too."""

    key: str
    again: str
    transposed: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Both keys."""
        return (self.key, self.again)

    def strips(self, config: ModelConfig, rows: int, keys: tuple[str, ...]) -> Iterator[Strip]:
        """Yield one strip, or one for each of both keys."""
        yield Strip(0, rows, keys[0], 0)
        if not config.tied:
            yield Strip(0, rows, keys[1], 0)


@dataclass(frozen=True)
class Stacked:
    """Several tensors with equally many rows, one below the other: [gate; up]."""

    keys: tuple[str, ...]
    transposed: bool = False

    def strips(self, config: ModelConfig, rows: int, keys: tuple[str, ...]) -> Iterator[Strip]:
        """Yield one strip for each."""
        each = rows // len(keys)
        for place, key in enumerate(keys):
            yield Strip(place * each, each, key, 0)


@dataclass(frozen=True)
class OneOrStacked:
    """One tensor of a plain unit, or of a gated one two, one below the other: [gate; up]."""

    plain: str
    gated: tuple[str, str]
    transposed: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The key of the plain unit, then both of a gated one."""
        return (self.plain, *self.gated)

    def strips(self, config: ModelConfig, rows: int, keys: tuple[str, ...]) -> Iterator[Strip]:
        """Yield one strip, or one for each half."""
        plain, *gated = keys
        if config.glu is None:
            yield Strip(0, rows, plain, 0)
        else:
            yield from Stacked(self.gated).strips(config, rows, tuple(gated))


@dataclass(frozen=True)
class OfExperts:
    """A stack of matrices, each made of `Stacked` tensors of its own.

    `{expert}` in a key stands for the number of the matrix.
    """

    keys: tuple[str, ...]
    transposed: bool = False

    def strips(self, config: ModelConfig, rows: int, keys: tuple[str, ...]) -> Iterator[Strip]:
        """Yield one strip for each key of each expert, of a stack as `flat` makes it."""
        experts = config.num_experts or 1
        each = rows // (experts * len(keys))
        for expert in range(experts):
            for place, key in enumerate(keys):
                start = (expert * len(keys) + place) * each
                yield Strip(start, each, key.replace("{expert}", str(expert)), 0)


@dataclass(frozen=True)
class StackInOne:
    """A stack of matrices in one tensor, [matrices, in, out], or of their biases, [matrices, out].

    Our rows are columns there. Those of two halves [a; b] may alternate: a0 b0 a1 b1 ...
    """

    key: str
    alternating: bool = False
    transposed: bool = True

    @property
    def keys(self) -> tuple[str, ...]:
        """The one key."""
        return (self.key,)

    def strips(self, config: ModelConfig, rows: int, keys: tuple[str, ...]) -> Iterator[Strip]:
        """Yield one strip of all rows, which says nothing of their order: see `columns`."""
        yield Strip(0, rows, keys[0], 0)

    def columns(self, rows: int) -> tuple[int, ...]:
        """Return the column there of each of the `rows` rows of one of our matrices."""
        if not self.alternating:
            return tuple(range(rows))
        half = rows // 2
        return tuple(2 * (row % half) + row // half for row in range(rows))

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape there of our stack [matrices, out, in] or [matrices, out]."""
        return (shape[0], *shape[:0:-1])


@dataclass(frozen=True)
class QkvApart:
    """Queries, keys and values in three tensors; ours has them group by group, [q .. q k v]."""

    keys: tuple[str, str, str]
    transposed: bool = False

    def strips(self, config: ModelConfig, rows: int, keys: tuple[str, ...]) -> Iterator[Strip]:
        """Yield three strips for each query group."""
        for start, which, count, at in _grouped(config):
            yield Strip(start, count, keys[which], at)


@dataclass(frozen=True)
class KvApart:
    """Keys and values in two tensors; ours has them group by group, [k v]."""

    keys: tuple[str, str]
    transposed: bool = False

    def strips(self, config: ModelConfig, rows: int, keys: tuple[str, ...]) -> Iterator[Strip]:
        """Yield two strips for each query group."""
        width = config.head_width
        for at in range(2 * config.query_groups):
            yield Strip(at * width, width, keys[at % 2], at // 2 * width)


@dataclass(frozen=True)
class QkvBlocks:
    """One tensor of all queries, then all keys, then all values."""

    key: str
    transposed: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The one key."""
        return (self.key,)

    def strips(self, config: ModelConfig, rows: int, keys: tuple[str, ...]) -> Iterator[Strip]:
        """Yield three strips for each query group."""
        queries = config.num_attention_heads * config.head_width
        block = (0, queries, queries + config.query_groups * config.head_width)
        for start, which, count, at in _grouped(config):
            yield Strip(start, count, keys[0], block[which] + at)


def less_than_ours(rule: TensorRule) -> float:
    """Return by how much values in files are less than ours."""
    return rule.less if isinstance(rule, Same) else 0.0


def flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of our tensor as rows: a stack of matrices is one below the other."""
    return shape if len(shape) < 3 else (shape[0] * shape[1], *shape[2:])


def box_of(shape: tuple[int, ...], strip: Strip) -> Box:
    """Return the box of a strip's rows in our tensor of `shape`."""
    columns = flat(shape)[1:]
    zeros = (0,) * len(columns)
    if len(shape) < 3:
        return Box((strip.start, *zeros), (strip.rows, *columns))
    matrix, row = divmod(strip.start, shape[1])
    return Box((matrix, row, *zeros), (1, strip.rows, *columns))


def their_shapes(
    shape: tuple[int, ...], strips: Iterable[Strip], *, transposed: bool
) -> dict[str, tuple[int, ...]]:
    """Return whole shapes of the file's tensors that the strips of one of ours make up."""
    shape = flat(shape)
    rows: dict[str, int] = {}
    for strip in strips:
        rows[strip.key] = max(rows.get(strip.key, 0), strip.at + strip.rows)
    if transposed:
        return {key: (shape[1], count) for key, count in rows.items()}
    return {key: (count, *shape[1:]) for key, count in rows.items()}


def _grouped(config: ModelConfig) -> Iterator[tuple[int, int, int, int]]:
    """Yield (our row, 0: query 1: key 2: value, rows, row among its kind) in our order."""
    width, groups = config.head_width, config.query_groups
    queries = config.num_attention_heads // groups * width
    start = 0
    for group in range(groups):
        for which, count in ((0, queries), (1, width), (2, width)):
            yield start, which, count, group * count
            start += count
