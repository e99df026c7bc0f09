"""The attention mask and the distances of tokens, computed once per forward pass.

All blocks of a model share one `AttentionGeometry`. What it makes depends on the length of the
sequence and on the id tensors of the carry alone, so all blocks of one pass get the same object. In
plain causal training without rotation there is nothing to make.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.config.model import ModelConfig, PositionEmbedding
from megatron.config.training import AttentionBackend
from megatron.errors import ConfigError
from megatron.model.positions import RotaryAngles, Rotation, alibi_slopes
from megatron.model.specs import ModelBuild
from megatron.ops.prefix_attention import Spans, are_faster_than_a_mask, prefix_spans


class CachedAttention(Protocol):
    """Attention of the tokens of one pass to the keys of their sequences, which a cache holds."""

    def attend(
        self, layer: int, heads: "CachedHeads", *, is_wide: bool, soft_cap: float | None
    ) -> Tensor:
        """Store keys and values of all tokens, and return the output of their queries.

        Args:
            is_wide: the layer has no sliding window.
            soft_cap: the bound of scores (`ScoreChanges`).

        Returns:
            [t, g/tp, queries, d], as `heads.queries`.
        """


@dataclass(frozen=True, slots=True)
class CachedHeads:
    """What a layer computes of t tokens, of any sequences, for its attention.

    Attributes:
        queries: [t, g/tp, queries, d], of the query heads of each group.
        keys: [t, g/tp, d]; values alike.
        sinks: [a/tp] scores beside those of the keys, or None.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Geometry:
    """Positions and mask of the tokens of one forward pass, as attention needs them.

    `mask` is None for plain causal attention, and for that of everything to everything (`causal`
    distinguishes them); otherwise it is complete: booleans [b, 1, s, k] (True: may attend) or
    numbers to add to the scores [1 or b, a/tp, s, k]. Under context parallelism the rows are the
    rank's own queries and the columns the keys in the order of ranks, or, where ranks exchange
    tokens for heads, both are the whole sequence and the heads are a/(tp cp). `wide_mask` is that
    of layers without the window that the others have. `spans` replace the mask of documents with
    prefixes where attention is computed block by block.
    """

    mask: Tensor | None = None
    wide_mask: Tensor | None = None
    causal: bool = True
    spans: Spans | None = None
    rotation: Rotation | None = None
    window_rotation: Rotation | None = None  # of layers with a window, where it is another
    cached: CachedAttention | None = None  # replaces masks: the tokens are of any sequences


class AttentionGeometry:
    """Computes the `Geometry` of a forward pass, and caches the last one.

    Memory: one ALiBi bias of a/tp x s x s numbers, one mask of documents or prefixes of b x s x s
    booleans, or the s x s booleans of a window that is shorter than the sequence; the first two
    again where some layers have a window and others have none.

    Args:
        causal: no token attends to a later one that is not of a prefix; else every token attends
            to all of its document.

    Raises:
        ConfigError: relative positions, of which only an encoder and its decoder have tables.
    """

    has_table = False

    def __init__(self, config: ModelConfig, build: ModelBuild, *, causal: bool = True) -> None:
        kind = config.position_embedding_type
        if kind is PositionEmbedding.RELATIVE and not self.has_table:
            raise relative_positions_refused()
        self._causal = causal
        self.of_pass: Geometry | None = None  # set by GPTModel for the length of one cached pass
        self._dtype = build.dtype
        self._share = build.share
        self._parts = build.ctx.cp.size * (build.ctx.tp.size if build.sequence_parallel else 1)
        self._window = config.sliding_window
        self._is_wide_somewhere = bool(config.layers_without_window)
        self._angles = RotaryAngles(config) if kind is PositionEmbedding.ROPE else None
        own = config.of_windows
        self._window_angles = None if own is None else RotaryAngles(own)
        self._slopes: Tensor | None = None
        if kind is PositionEmbedding.ALIBI:
            # On the CPU also where layers are built without values, as `device("meta")` does.
            listed = alibi_slopes(config.num_attention_heads)
            slopes = torch.tensor(listed, dtype=torch.float64, device="cpu")
            self._slopes = slopes.chunk(build.ctx.tp.size)[build.ctx.tp.rank]
            if not self._share.paired:  # heads are shared out over cp
                self._slopes = self._slopes.chunk(build.ctx.cp.size)[build.ctx.cp.rank]
        # Attention over blocks has none of what needs all scores, or merges parts by itself.
        self._may_split = (
            self._slopes is None
            and config.sliding_window is None
            and not config.has_sinks
            and config.attention_soft_cap is None
            and config.attention_dropout == 0
            and build.attention_backend is AttentionBackend.AUTO
            and build.compiler is None  # its graphs would be of the borders in one batch
            and (self._share.size == 1 or not self._share.paired)
        )
        self._plain = _Remembered()
        self._with_ids = _Remembered()

    def of(
        self,
        hidden: Tensor,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        is_prefix: Tensor | None = None,
    ) -> Geometry:
        """Return the geometry of hidden states [s, b, h] whose ids, if any, are [b, s] int64.

        Under sequence parallelism hidden states are [s/tp, b, h], under context parallelism
        [s/cp, b, h]; the ids are whole.

        Args:
            is_prefix: [b, s], not 0 for tokens that all tokens of their document may see.
        """
        # Attention always sees the whole sequence.
        length, device = hidden.shape[0] * self._parts, hidden.device
        if self.of_pass is not None:
            return self.of_pass
        if position_ids is None and document_ids is None and is_prefix is None:
            nothing = self._angles is None and self._slopes is None
            if nothing and self._window_within(length) is None:
                return Geometry(causal=self._causal)
            cached = self._plain.find(length, device)
            return cached or self._plain.keep(self._make(length, device), length, device)
        ids = (position_ids, document_ids, is_prefix)
        cached = self._with_ids.find(length, device, *ids)
        if cached is None:
            cached = self._with_ids.keep(self._make(length, device, *ids), length, device, *ids)
        return cached

    def of_carry(self, hidden: Tensor, ids: Sequence[Tensor]) -> Geometry:
        """Return `of` for what follows hidden states in a carry: positions?, documents?, prefixes?

        Args:
            ids: none, one, two or all three of them.
        """
        return self.of(hidden, *(*ids, *[None] * (3 - len(ids))))

    @torch.inference_mode(False)  # an inference tensor in here would break the next training step
    @torch.no_grad()
    def _make(
        self,
        length: int,
        device: torch.device,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        is_prefix: Tensor | None = None,
    ) -> Geometry:
        own_indexes = self._share.positions(length, device)
        own_ids = None if position_ids is None else self._share.take(position_ids, 1)
        rotations = self._rotations(own_indexes if own_ids is None else own_ids)
        if is_prefix is not None and self._may_split and device.type == "cpu":
            whole = torch.zeros_like(is_prefix) if document_ids is None else document_ids
            spans = prefix_spans(whole, is_prefix)
            if spans is not None and are_faster_than_a_mask(spans, *is_prefix.shape):
                return Geometry(None, None, False, spans, *rotations)
        queries, keys = own_indexes, self._share.gathered_positions(length, device)
        if not self._share.paired:
            queries = keys  # in attention this rank has some heads of all tokens
        distance = queries[:, None] - keys  # [s, k]
        # A token sees itself and those before it, or all.
        allowed = distance >= 0 if self._causal else torch.ones_like(distance, dtype=torch.bool)
        if is_prefix is not None:
            allowed = allowed | (is_prefix[:, keys] != 0)[:, None, None]  # [b, 1, s, k]
        if document_ids is not None:
            of_queries, of_keys = (document_ids[:, at] for at in (queries, keys))
            same = of_queries[:, None, :, None] == of_keys[:, None, None]
            allowed = allowed & same  # [b, 1, s, k]
        # abs changes nothing where only what came before is seen.
        window = self._window_within(length)
        near, wide = self._masks(distance.abs(), allowed, window)
        if self._slopes is None and document_ids is None and is_prefix is None:
            return Geometry(None if window is None else near, None, self._causal, None, *rotations)
        # Where later tokens are seen, ranks that share a sequence need the keys of all others.
        causal = self._causal and is_prefix is None
        return Geometry(near, wide, causal, None, *rotations)

    def cached(self, positions: Tensor, attention: CachedAttention) -> Geometry:
        """Return the geometry of tokens at int64 `positions` [t] that attend through a cache."""
        plain, own = self._rotations(positions.unsqueeze(1))
        return Geometry(rotation=plain, window_rotation=own, cached=attention)

    def biases(self, positions: Tensor, keys: int, *, prefix: int = 0) -> tuple[Tensor, Tensor]:
        """Return what is added to the scores of queries over the keys at positions 0..keys-1.

        Args:
            positions: int64 [b, s] of the queries.
            prefix: the keys below this position are seen by all queries.

        Returns:
            [b, 1 or a/tp, s, keys] in the dtype of the model, -inf where a query may not attend:
            of layers with the window, and of those without one.
        """
        places = torch.arange(keys, device=positions.device)
        distance = positions[:, None, :, None] - places
        allowed = (distance >= 0) | (places < prefix)
        near, wide = self._masks(distance.abs(), allowed, self._window)
        of_windows = self._added(near)
        return of_windows, of_windows if wide is None or wide is near else self._added(wide)

    def _added(self, mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=self._dtype).masked_fill_(~mask, -torch.inf)

    def _rotations(self, positions: Tensor) -> tuple[Rotation | None, Rotation | None]:
        """Return the rotation of int64 positions [s] or [b, s], and of layers with a window."""
        plain, own = (
            None if angles is None else angles.at(positions, self._dtype)
            for angles in (self._angles, self._window_angles)
        )
        return plain, own

    def _masks(
        self, distance: Tensor, allowed: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mask of layers with the window, and of those without one; biases for ALiBi."""
        near = allowed if window is None else allowed & (distance < window)
        wide = allowed if self._is_wide_somewhere else None
        if self._slopes is None:
            return near, wide
        bias = self._bias(distance, near)
        if wide is None:
            return bias, None
        return bias, bias if near is wide else self._bias(distance, wide)

    def _window_within(self, length: int) -> int | None:
        """Return the window if a sequence is longer than it; None where every token sees all."""
        return self._window if self._window is not None and length > self._window else None

    def _bias(self, distance: Tensor, allowed: Tensor) -> Tensor:
        """Return -slope x distance where attention is allowed, else -inf: [1 or b, a/tp, s, k].

        Distances rather than key positions (equal under softmax): near tokens, which matter most,
        then have small numbers that half precision holds exactly.
        """
        assert self._slopes is not None  # noqa: S101  # invariant: only asked for with ALiBi
        # Not in float64 for its own sake: for long sequences this is the largest tensor of all.
        wide = torch.promote_types(self._dtype, torch.float32)
        slopes = self._slopes.to(distance.device, wide)[:, None, None]
        bias = -slopes * distance  # [a/tp, s, k], or [b, a/tp, s, k] with a cache
        bias = bias.masked_fill(~allowed, -torch.inf).to(self._dtype)
        return bias if bias.dim() == 4 else bias.unsqueeze(0)


def relative_positions_refused() -> ConfigError:
    """Return the error of a model of one stack with relative positions."""
    return ConfigError(
        "relative positions are those of an encoder and its decoder",
        found=f"--position-embedding-type {PositionEmbedding.RELATIVE} for a model of one stack",
        fix="use pretrain_t5.py, or --position-embedding-type alibi for biases without a table",
    )


class _Remembered:
    """A cache of the last geometry; a hit needs the same tensors, unmodified."""

    def __init__(self) -> None:
        self._geometry: Geometry | None = None
        self._about: tuple[int, torch.device] | None = None
        self._ids: tuple[Tensor | None, ...] = ()
        self._versions: tuple[int, ...] = ()

    def find(self, length: int, device: torch.device, *ids: Tensor | None) -> Geometry | None:
        same = (
            self._about == (length, device)
            and len(ids) == len(self._ids)
            and all(now is before for now, before in zip(ids, self._ids))
            and self._versions == _versions(ids)
        )
        return self._geometry if same else None

    def keep(
        self, geometry: Geometry, length: int, device: torch.device, *ids: Tensor | None
    ) -> Geometry:
        self._geometry, self._about = geometry, (length, device)
        self._ids, self._versions = ids, _versions(ids)
        return geometry


def _versions(ids: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    # Inference tensors count no versions; they are made anew for every request.
    return tuple(t._version for t in ids if t is not None and not t.is_inference())
