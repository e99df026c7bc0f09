"""Attention of the tokens of a step to the keys of their sequences in a `PagedCache`.

The queries of a group are folded into rows (of single tokens) or into the batch (of longer slices),
so that no key is repeated. Rows and keys are padded as `attention_plan` says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.inference.attention_plan import AttentionGroup, padded_to
from megatron.inference.paged_cache import PagedCache
from megatron.model.geometry import AttentionGeometry, CachedHeads
from megatron.ops.attention import ScoreChanges, attend_by_scores, attend_by_torch
from megatron.ops.attention_blocks import add_sinks_, attend_block
from megatron.scheduling.forward_plan import SequenceSlice


@dataclass(frozen=True, slots=True)
class _GroupTensors:
    """An `AttentionGroup` on the device.

    Attributes:
        rows: its tokens in the step, sequence by sequence.
        table: [m x keys / block size] blocks of all sequences, padded with the null block.
        biases: [m, 1 or a/tp, tokens, keys] of layers with the window, and of those without.
    """

    rows: slice
    sequences: int
    table: Tensor
    biases: tuple[Tensor, Tensor]


class PagedAttention:
    """The `CachedAttention` of one step; tokens stand in the order of groups.

    Args:
        positions: int64 [t] of all tokens, padding included; padding is behind the others.
        row_multiple: of queries that attend together.
    """

    def __init__(
        self,
        cache: PagedCache,
        geometry: AttentionGeometry,
        slices: Sequence[SequenceSlice],
        groups: Sequence[AttentionGroup],
        positions: Tensor,
        *,
        row_multiple: int,
    ) -> None:
        self._cache = cache
        self._row_multiple = row_multiple
        device = positions.device
        self._slots = torch.tensor(
            [slot for group in groups for at in group.slices for slot in _slots(slices[at], cache)],
            device=device,
        )
        self._groups: list[_GroupTensors] = []
        first = 0
        for group in groups:
            members = [slices[at] for at in group.slices]
            rows = slice(first, first + len(members) * group.tokens)
            of_group = positions[rows].view(len(members), group.tokens)
            self._groups.append(
                _GroupTensors(
                    rows,
                    len(members),
                    torch.tensor(_table(members, group.keys, cache), device=device),
                    geometry.biases(of_group, group.keys),
                )
            )
            first = rows.stop

    def attend(
        self, layer: int, heads: CachedHeads, *, is_wide: bool, soft_cap: float | None
    ) -> Tensor:
        """Store keys and values of all tokens, and return the output of their queries.

        Arguments and result are those of `CachedAttention`; the output of padding is zeros.
        """
        count = len(self._slots)
        self._cache.write(layer, self._slots, heads.keys[:count], heads.values[:count])
        out = torch.empty_like(heads.queries, memory_format=torch.contiguous_format)
        out[count:] = 0.0
        for group in self._groups:
            keys, values = (
                half.view(group.sequences, -1, *half.shape[1:]).transpose(
                    1, 2
                )  # [m, g/tp, keys, d]
                for half in self._cache.read(layer, group.table)
            )
            of_group = heads.queries[group.rows]
            queries = of_group.view(group.sequences, -1, *of_group.shape[1:])
            fold = _single_tokens if queries.shape[1] == 1 else _one_sequence
            folded = fold(queries, group.biases[is_wide], heads.sinks)
            result = _attend(folded.with_rows_padded(self._row_multiple), keys, values, soft_cap)
            out[group.rows].view(queries.shape).copy_(folded.unfold(result, queries))
        return out


class _Folded(NamedTuple):
    """Queries as batches of rows that see the keys of one group of heads each: [b, g/tp, r, d].

    Attributes:
        bias: [1 or b, 1 or g/tp, 1 or r, keys].
        sinks: broadcasts to [b, g/tp, r].
        unfold: returns [m, t, g/tp, n, d] of the output of padded rows, given such queries.
    """

    rows: Tensor
    bias: Tensor
    sinks: Tensor | None
    unfold: Callable[[Tensor, Tensor], Tensor]

    def with_rows_padded(self, multiple: int) -> "_Folded":
        """Return the same with a multiple of rows; those that are added see every key."""
        count = self.rows.shape[2]
        missing = padded_to(count, multiple) - count
        if missing == 0:
            return self
        around = (0, 0, 0, missing)
        bias = self.bias if self.bias.shape[2] == 1 else F.pad(self.bias, around)
        sinks = self.sinks
        if sinks is not None and sinks.shape[-1] > 1:
            sinks = F.pad(sinks, (0, missing))
        return _Folded(F.pad(self.rows, around), bias, sinks, self.unfold)


def _single_tokens(queries: Tensor, bias: Tensor, sinks: Tensor | None) -> _Folded:
    """Fold queries [m, 1, g/tp, n, d] into [m, g/tp, n, d]."""
    groups, each = queries.shape[2:4]
    return _Folded(
        queries[:, 0],
        bias.view(len(bias), groups, each, -1) if bias.shape[1] > 1 else bias,
        None if sinks is None else sinks.view(1, groups, each),
        lambda result, queries: result[:, None, :, : queries.shape[3]],
    )


def _one_sequence(queries: Tensor, bias: Tensor, sinks: Tensor | None) -> _Folded:
    """Fold queries [1, t, g/tp, n, d] into [n, g/tp, t, d]."""
    groups, each = queries.shape[2:4]
    return _Folded(
        queries[0].permute(2, 1, 0, 3),
        bias.view(groups, each, *bias.shape[2:]).transpose(0, 1) if bias.shape[1] > 1 else bias,
        None if sinks is None else sinks.view(groups, each).t().unsqueeze(-1),
        lambda result, queries: result[:, :, : queries.shape[1]].permute(2, 1, 0, 3).unsqueeze(0),
    )


def _attend(folded: _Folded, keys: Tensor, values: Tensor, soft_cap: float | None) -> Tensor:
    """Return the output of rows for keys and values [m, g/tp, keys, d], as the rows."""
    rows, bias, sinks, _ = folded
    keys, values = (half.expand(len(rows), -1, -1, -1) for half in (keys, values))
    if soft_cap is not None:
        changes = ScoreChanges(sinks, soft_cap)
        return attend_by_scores(rows, keys, values, causal=False, mask=bias, changes=changes)
    if sinks is None:
        return attend_by_torch(rows, keys, values, causal=False, mask=bias)
    part, sums = attend_block(rows, keys, values, bias, causal=False)
    wide = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
    add_sinks_(wide, sums.contiguous(), sinks)
    return wide.to(rows.dtype)


def _slots(each: SequenceSlice, cache: PagedCache) -> list[int]:
    """Return the slots in the pool of all tokens of a slice."""
    size = cache.block_size
    return [each.blocks[at // size] * size + at % size for at in range(each.start, each.end)]


def _table(members: Sequence[SequenceSlice], keys: int, cache: PagedCache) -> list[int]:
    """Return the blocks of all members one after the other, each padded to `keys`."""
    length = keys // cache.block_size
    used = [each.blocks[: -(-each.end // cache.block_size)] for each in members]
    null = cache.null_block
    return [block for row in used for block in (*row, *[null] * (length - len(row)))]
