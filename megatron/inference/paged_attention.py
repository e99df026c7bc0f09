"""Attention of the tokens of a step to the keys of their sequences in a `PagedCache`.

The queries of a group are folded into rows (of single tokens) or into the batch (of longer slices),
so that no key is repeated. Rows and keys are padded as `attention_plan` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
class _SingleTokens:
    """Folds queries [m, g/tp, n, d] of single tokens: those of a group are the rows of it."""

    rows: int  # with padding

    def fold(self, queries: Tensor) -> Tensor:
        """Return [m, g/tp, rows, d]."""
        missing = self.rows - queries.shape[2]
        return F.pad(queries, (0, 0, 0, missing)) if missing else queries

    def fold_bias(self, bias: Tensor, each: int) -> Tensor:
        """Return the bias [m, 1 or a/tp, 1, keys] for rows; those that are added see every key."""
        if bias.shape[1] == 1:
            return bias
        of_groups = bias.view(len(bias), -1, each, bias.shape[3])
        return F.pad(of_groups, (0, 0, 0, self.rows - each))

    def fold_sinks(self, sinks: Tensor, each: int) -> Tensor:
        """Return sinks [a/tp] for rows."""
        return F.pad(sinks.view(1, -1, each), (0, self.rows - each))

    def unfold(self, result: Tensor, each: int) -> Tensor:
        """Return [m, g/tp, n, d] of the output of rows."""
        return result[:, :, :each]


@dataclass(frozen=True, slots=True)
class _OneSequence:
    """Folds queries [t, g/tp, n, d] of one sequence: those of a group are n batches of t rows."""

    rows: int

    def fold(self, queries: Tensor) -> Tensor:
        """Return [n, g/tp, rows, d]."""
        by_query = queries.permute(2, 1, 0, 3)
        missing = self.rows - by_query.shape[2]
        return F.pad(by_query, (0, 0, 0, missing)) if missing else by_query

    def fold_bias(self, bias: Tensor, each: int) -> Tensor:
        """Return the bias [1, 1 or a/tp, t, keys] for rows."""
        if bias.shape[1] > 1:
            bias = bias.view(-1, each, *bias.shape[2:]).transpose(0, 1)
        return F.pad(bias, (0, 0, 0, self.rows - bias.shape[2]))

    def fold_sinks(self, sinks: Tensor, each: int) -> Tensor:
        """Return sinks [a/tp] for rows."""
        return sinks.view(-1, each).t().unsqueeze(-1)

    def unfold(self, result: Tensor, each: int) -> Tensor:
        """Return [t, g/tp, n, d] of the output of rows; those that were added come last."""
        return result.permute(2, 1, 0, 3)


@dataclass(frozen=True, slots=True)
class _GroupTensors:
    """An `AttentionGroup` on the device, with everything that all layers share.

    Attributes:
        tokens: places of its tokens in the step, sequence by sequence.
        table: [m x keys / block size] blocks of all sequences, padded with the null block.
        room: [2, m x keys / block size, ..] what their keys and values are read into.
        keys: [b, g/tp, keys, d] views of the room, as folded rows need them; values alike.
        biases: of layers with the window, and of those without, as folded rows need them.
    """

    tokens: slice
    fold: _SingleTokens | _OneSequence
    table: Tensor
    room: Tensor
    keys: Tensor
    values: Tensor
    biases: tuple[Tensor, Tensor]


class PagedAttention:
    """The `CachedAttention` of one step; tokens stand in the order of groups.

    Args:
        positions: int64 [t] of all tokens, padding included; padding is behind the others.
        row_multiple: of queries that attend together.
        each: query heads of a group.
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
        each: int,
    ) -> None:
        self._cache, self._each = cache, each
        device = positions.device
        in_order = [slices[at] for group in groups for at in group.slices]
        self._slots = torch.tensor(cache.slots(in_order), device=device)
        cache.reserve(max(len(g.slices) * g.keys for g in groups) // cache.block_size)
        self._groups: list[_GroupTensors] = []
        first = 0
        for group in groups:
            members = [slices[at] for at in group.slices]
            tokens = slice(first, first + len(members) * group.tokens)
            first = tokens.stop
            table = torch.tensor(_table(members, group.keys, cache), device=device)
            room = cache.room(len(table))
            fold: _SingleTokens | _OneSequence
            fold = _SingleTokens(padded_to(each, row_multiple))
            batch = len(members)
            if group.tokens > 1:
                fold, batch = _OneSequence(padded_to(group.tokens, row_multiple)), each
            keys, values = room.view(2, len(members), group.keys, *room.shape[3:]).transpose(2, 3)
            near, wide = geometry.biases(
                positions[tokens].view(len(members), group.tokens),
                group.keys,
                # Single tokens stand alone in their prefix, or behind it.
                prefix=members[0].prefix if group.tokens > 1 else 0,
            )
            of_windows = fold.fold_bias(near, each)
            biases = (of_windows, of_windows if wide is near else fold.fold_bias(wide, each))
            keys, values = (half.expand(batch, -1, -1, -1) for half in (keys, values))
            self._groups.append(_GroupTensors(tokens, fold, table, room, keys, values, biases))

    def attend(
        self, layer: int, heads: CachedHeads, *, is_wide: bool, soft_cap: float | None
    ) -> Tensor:
        """Store keys and values of all tokens, and return the output of their queries.

        Arguments and result are those of `CachedAttention`; the output of padding is zeros.
        """
        count, queries = len(self._slots), heads.queries
        self._cache.write(layer, self._slots, heads.keys[:count], heads.values[:count])
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        if count < len(out):
            out[count:] = 0.0
        for group in self._groups:
            self._cache.read(layer, group.table, group.room)
            rows, bias = group.fold.fold(queries[group.tokens]), group.biases[is_wide]
            sinks = None
            if heads.sinks is not None:
                sinks = group.fold.fold_sinks(heads.sinks, self._each)
            if soft_cap is not None:
                changes = ScoreChanges(sinks, soft_cap)
                result = attend_by_scores(
                    rows, group.keys, group.values, causal=False, mask=bias, changes=changes
                )
            elif sinks is not None:
                result = _attend_with_sinks(rows, group, bias, sinks)
            else:
                result = attend_by_torch(rows, group.keys, group.values, causal=False, mask=bias)
            unfolded = group.fold.unfold(result, self._each)
            out[group.tokens] = unfolded[: group.tokens.stop - group.tokens.start]
        return out


def _attend_with_sinks(rows: Tensor, group: _GroupTensors, bias: Tensor, sinks: Tensor) -> Tensor:
    part, sums = attend_block(rows, group.keys, group.values, bias, causal=False)
    wide = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
    add_sinks_(wide, sums.contiguous(), sinks)
    return wide.to(rows.dtype)


def _table(members: Sequence[SequenceSlice], keys: int, cache: PagedCache) -> list[int]:
    """Return the blocks of all members one after the other, each padded to `keys`."""
    length = keys // cache.block_size
    used = [each.blocks[: -(-each.end // cache.block_size)] for each in members]
    null = cache.null_block
    return [block for row in used for block in (*row, *[null] * (length - len(row)))]
