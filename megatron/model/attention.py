"""Self attention on torch's fused kernels: multi-head, grouped-query and multi-query.

Rows of the query/key/value matrix stand group by group, [q .. q k v] per query group, so that an
even split of the rows gives each tp rank whole groups. Masks and angles are data that `geometry`
makes; nothing here depends on the kind of positions.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.config.activations import RecomputeModule
from megatron.config.model import ModelConfig, SoftmaxType
from megatron.config.parallel import ContextExchange
from megatron.config.training import AttentionBackend
from megatron.errors import ConfigError
from megatron.model.geometry import CachedHeads, Geometry
from megatron.model.init import residual_init, weight_init
from megatron.model.norms import build_head_norm
from megatron.model.specs import ModelBuild
from megatron.mpu.context import Group
from megatron.mpu.context_parallel.attention import AttentionOverRanks
from megatron.mpu.context_parallel.heads import heads_to_tokens, tokens_to_heads
from megatron.mpu.context_parallel.shares import SequenceShare
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.partition import Partition, set_parameter_metadata, set_row_runs
from megatron.mpu.recompute import recompute
from megatron.mpu.topology import Topology
from megatron.ops.attention import (
    ScoreChanges,
    attend,
    attend_by_scores,
    attend_by_torch,
    for_each_head,
)
from megatron.ops.prefix_attention import Spans, attend_spans
from megatron.ops.rotary import rotate, rotate_reference, split_rotated

# On a CPU flash is torch's own kernel.
_KERNELS = {
    AttentionBackend.FLASH: SDPBackend.FLASH_ATTENTION,
    AttentionBackend.FUSED: SDPBackend.CUDNN_ATTENTION,
    AttentionBackend.UNFUSED: SDPBackend.MATH,
    AttentionBackend.LOCAL: SDPBackend.MATH,
}
_NO_KERNEL = ("No available kernel", "No viable backend")  # what torch says, on CUDA and on CPUs


class HeadAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v per head (Vaswani et al. 2017, eq. 1; groups: arXiv 2305.13245).

    What attention does with queries, keys and values, whatever they are projected from. Another
    factor than 1 / sqrt(d) is made one of the queries, since kernels have this one. Under context
    parallelism a rank's queries see the keys of all ranks of cp, or its heads all tokens: see
    `mpu/context_parallel`.

    Args:
        place: the name of this attention in its layer, which makes its dropout differ from others.

    Raises:
        ConfigError: the query groups do not divide over the tp ranks, or see `sharing_problems`.
    """

    dropout_seed: Tensor

    def __init__(self, config: ModelConfig, build: ModelBuild, *, layer: int, place: str) -> None:
        super().__init__()
        heads, groups = config.num_attention_heads, config.query_groups
        tp = build.ctx.tp.size
        if groups % tp:
            raise ConfigError(
                "the query groups do not divide over the tensor-parallel ranks",
                found=f"{groups} query groups (of {heads} heads), "
                f"--tensor-model-parallel-size {tp}",
                fix=f"use a tensor-parallel size that divides {groups}",
            )
        self._layer, self._width = layer, config.head_width
        self._groups, self._queries = groups // tp, heads // groups  # queries per group
        self._backend = build.attention_backend
        self._dropout, self._streams = config.attention_dropout, build.streams
        self._heads, self._place = heads, (place, layer)
        seed = torch.tensor(self._streams.seed_of("dropout", *self._place))
        self.register_buffer("dropout_seed", seed, persistent=False)
        self._query_factor, self._soft_cap = config.query_factor, config.attention_soft_cap
        self._is_wide = layer in config.layers_without_window
        for problem in sharing_problems(
            config, build.ctx.topology, build.context_exchange, build.attention_backend
        ):
            raise problem
        self._tp, self._cp = build.ctx.tp, build.ctx.cp
        self._over_ranks = attention_over_ranks(config, build)
        self._exchanges_heads = build.ctx.cp.size > 1 and not _passes_keys(build)
        self._has_sinks = config.has_sinks
        self.sinks: nn.Parameter | None = None  # [a/tp]
        if config.softmax_type is SoftmaxType.LEARNABLE:
            self.sinks = nn.Parameter(torch.empty(heads // tp, dtype=build.dtype))
            set_parameter_metadata(
                self.sinks, init=weight_init(config), partition=Partition("tp", dim=0)
            )
        self._recomputed = RecomputeModule.CORE_ATTN in build.activations.modules

    def _projection(
        self, config: ModelConfig, build: ModelBuild, rows: int
    ) -> ColumnParallelLinear:
        """Return a matrix that makes `rows` channels of heads from hidden states."""
        return (
            ColumnParallelLinear(
                config.hidden_size,
                rows,
                ctx=build.ctx,
                bias=config.add_bias_linear or config.add_qkv_bias,
                init=weight_init(config),
                sequence_parallel=build.sequence_parallel,
                dtype=build.dtype,
            )
            .in_fp8(build.fp8)
            .on_ring(build.tp_comm_overlap)
        )

    def _output(self, config: ModelConfig, build: ModelBuild) -> RowParallelLinear:
        """Return the matrix that makes hidden states from the outputs of all heads."""
        return (
            RowParallelLinear(
                config.num_attention_heads * config.head_width,
                config.hidden_size,
                ctx=build.ctx,
                bias=config.add_bias_linear,
                init=residual_init(config),
                sequence_parallel=build.sequence_parallel,
                dtype=build.dtype,
            )
            .in_fp8(build.fp8)
            .on_ring(build.tp_comm_overlap)
        )

    def _context(self, queries: Tensor, keys: Tensor, values: Tensor, geometry: Geometry) -> Tensor:
        """Return the outputs of all heads of this rank, [s, b, d a/tp].

        Args:
            queries: [s, b, g/tp, queries of a group, d].
            keys: [k, b, g/tp, 1, d]; values alike.
        """
        q = queries.flatten(2, 3).permute(1, 2, 0, 3)  # [b, a/tp, s, d]
        k = keys.squeeze(3).permute(1, 2, 0, 3)  # [b, g/tp, s, d]
        v = values.squeeze(3).permute(1, 2, 0, 3)
        if self._exchanges_heads:
            q, k, v = tokens_to_heads(q, k, v, self._cp)
        mask = geometry.wide_mask if self._is_wide else geometry.mask
        given = (q, k, v, mask, geometry.causal, geometry.spans)
        if self._recomputed and self.training:
            context = recompute(self._attend, self._streams, *given)
        else:
            context = self._attend(*given)  # [b, a/tp, s, d]
        if self._exchanges_heads:
            context = heads_to_tokens(context, self._cp)
        return context.permute(2, 0, 1, 3).flatten(2, 3)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        spans: Spans | None = None,
    ) -> Tensor:
        if spans is not None:
            return attend_spans(q, k, v, spans)
        sinks = self._sinks_of(q) if self._has_sinks else None
        dropout = self._dropout if self.training else 0.0
        is_capped = self._soft_cap is not None
        if is_capped or (dropout > 0 and (sinks is not None or self._holds_scores(q))):
            names = (self.dropout_seed, self._numbers_of(q)) if dropout > 0 else None
            changes = ScoreChanges(sinks, self._soft_cap, dropout, names)
            return attend_by_scores(
                q, k, v, causal=causal and mask is None, mask=mask, changes=changes
            )
        if self._over_ranks is not None:
            return self._over_ranks(q, k, v, mask, causal, sinks)
        is_chosen = self._backend is not AttentionBackend.AUTO
        if mask is None and dropout == 0 and not is_chosen:
            return attend(q, k, v, causal=causal)
        # Not those of the whole model: ranks that exchange tokens for heads may have more keys.
        if mask is not None:
            # The fused kernels that take a mask on CUDA do not take groups, and torch would fall
            # back to the one that stores all scores.
            k, v = (for_each_head(t, q.shape[1]) for t in (k, v))
        # Kernels that hold no scores draw by themselves, from a seed that nothing else has.
        drawing: AbstractContextManager[None] = (
            self._streams.generator("scores", *self._place, self._own_heads(q.shape[1]).start)
            if dropout > 0
            else nullcontext()
        )
        with drawing, sdpa_kernel(_KERNELS[self._backend]) if is_chosen else nullcontext():
            try:
                return attend_by_torch(
                    q, k, v, causal=causal and mask is None, mask=mask, dropout=dropout
                )
            except RuntimeError as error:
                if not str(error).startswith(_NO_KERNEL):
                    raise
                raise ConfigError(
                    "the kernel of attention that was asked for cannot compute this attention",
                    found=f"--attention-backend {self._backend}, {q.dtype} on {q.device.type}, "
                    f"{self._width} channels a head, {'a' if mask is not None else 'no'} mask, "
                    f"dropout {dropout}",
                    fix="leave out --attention-backend, or use unfused",
                ) from error

    def _holds_scores(self, q: Tensor) -> bool:
        """Return whether all scores are in memory, so that those that are dropped can have names.

        No kernel of PyTorch for CPUs drops scores without.
        """
        if self._backend is AttentionBackend.AUTO:
            return q.device.type == "cpu"
        return _KERNELS[self._backend] is SDPBackend.MATH

    def _numbers_of(self, q: Tensor) -> Tensor:
        """Return the numbers of the queries of every row and head: the same ones in all layers."""
        batch, heads, length, _ = q.shape
        own = self._own_heads(heads)
        return self._streams.once(
            ("queries", batch, own, length, q.device),
            lambda: self._streams.heads(batch, own, self._heads, length, q.device),
        )

    def _sinks_of(self, q: Tensor) -> Tensor:
        """Return the sinks of the heads of queries [b, a, s, d], which this rank has: [a]."""
        heads = self._own_heads(q.shape[1])
        if self.sinks is None:
            return q.new_zeros(len(heads))
        first = heads.start - self._tp.rank * len(self.sinks)
        return self.sinks[first : first + len(heads)]

    def _own_heads(self, count: int) -> range:
        """Return which heads this rank has in attention, `count` of them."""
        shares = self._heads // (self._tp.size * count)  # of the heads of a tp rank, over cp
        first = (self._tp.rank * shares + (self._cp.rank if shares > 1 else 0)) * count
        return range(first, first + count)


class SelfAttention(HeadAttention):
    """Attention of tokens to tokens of their own sequence, through one matrix of q, k and v.

    Raises:
        ConfigError: as `HeadAttention`.
    """

    def __init__(
        self, config: ModelConfig, build: ModelBuild, *, layer: int, place: str = "attention"
    ) -> None:
        super().__init__(config, build, layer=layer, place=place)
        heads, groups, width = config.num_attention_heads, config.query_groups, config.head_width
        self._rotates = layer not in config.layers_without_rotation
        self._fuse_rope = build.fuse_rope
        self.qkv = self._projection(config, build, (heads + 2 * groups) * width)
        set_row_runs(self.qkv.weight, (self._queries * width, width, width))
        self.query_norm = self.key_norm = None
        if config.qk_layernorm:
            self.query_norm = build_head_norm(config, build, heads=heads)
            self.key_norm = build_head_norm(config, build, heads=groups)
        self.output = self._output(config, build)

    def forward(self, hidden: Tensor, geometry: Geometry) -> Tensor:
        """Apply attention under the mask of `geometry`: [s, b, h] to the same.

        Under sequence parallelism both are [s/tp, b, h], and the whole sequence is in between;
        under context parallelism that is the rank's own share of it.
        """
        queries, keys, values = self._heads_of(hidden, geometry)
        if self._query_factor != 1.0:
            queries = queries * self._query_factor
        if geometry.cached is not None:  # [1, t, ..]: a batch of tokens
            sinks = self._sinks_of(queries[0].flatten(1, 2)) if self._has_sinks else None
            heads = CachedHeads(queries[0], keys[0, :, :, 0], values[0, :, :, 0], sinks)
            context = geometry.cached.attend(
                self._layer, heads, is_wide=self._is_wide, soft_cap=self._soft_cap
            )
            cached_output: Tensor = self.output(context.flatten(1).unsqueeze(0))
            return cached_output
        output: Tensor = self.output(self._context(queries, keys, values, geometry))
        return output

    def _heads_of(self, hidden: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [s, b, g/tp, queries, d] and keys [s, b, g/tp, 1, d], and values.

        Where one operator rotates and splits, none of them is a view of what was projected, which
        is then not kept.
        """
        projected = self.qkv(hidden)
        grouped = projected.view(
            *projected.shape[:-1], self._groups, self._queries + 2, self._width
        )
        own = None if self._is_wide else geometry.window_rotation
        rotation = geometry.rotation if own is None else own
        if not self._rotates:
            rotation = None
        has_norms = self.query_norm is not None and self.key_norm is not None
        if rotation is not None and self._fuse_rope and not has_norms:
            return split_rotated(grouped, *rotation)
        # One split has one concatenation as its gradient.
        queries, keys, values = grouped.split((self._queries, 1, 1), dim=3)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        if rotation is not None:
            turn = rotate if self._fuse_rope else partial(rotate_reference, back=False)
            queries, keys = turn(queries, *rotation), turn(keys, *rotation)
        return queries, keys, values


def sharing_problems(
    config: ModelConfig, grid: Topology, exchange: ContextExchange, backend: AttentionBackend
) -> Iterator[ConfigError]:
    """Yield what attention over the ranks of cp, with sinks or with a soft cap, cannot do."""
    is_flash = backend in (AttentionBackend.AUTO, AttentionBackend.FLASH)
    if config.has_sinks and not is_flash:
        yield ConfigError(
            "sinks are added to what the flash kernel returns",
            found=f"--softmax-type {config.softmax_type}, --attention-backend {backend}",
            fix="leave --attention-backend out",
        )
    is_fused = backend in (AttentionBackend.FLASH, AttentionBackend.FUSED)
    if config.attention_soft_cap is not None and is_fused:
        yield ConfigError(
            "scores with a soft cap are computed by no fused kernel",
            found=f"--attention-soft-cap {config.attention_soft_cap}, "
            f"--attention-backend {backend}",
            fix="leave --attention-backend out",
        )
    if grid.cp == 1:
        return
    given = f"--context-parallel-size {grid.cp} --cp-comm-type {exchange}"
    if exchange is ContextExchange.A2A:
        if config.num_attention_heads % (grid.cp * grid.tp):
            yield ConfigError(
                "attention heads cannot be shared out evenly over the context-parallel ranks",
                found=f"--num-attention-heads {config.num_attention_heads}, {given}, "
                f"--tensor-model-parallel-size {grid.tp}",
                fix="use sizes whose product divides the heads, or --cp-comm-type p2p",
            )
        return
    if config.attention_soft_cap is not None:
        yield ConfigError(
            "attention over several ranks is computed in parts, by kernels without a soft cap",
            found=f"{given}, --attention-soft-cap {config.attention_soft_cap}",
            fix="use --cp-comm-type a2a",
        )
    if config.attention_dropout > 0:
        yield ConfigError(
            "attention over several ranks is computed in parts, by kernels without dropout",
            found=f"{given}, --attention-dropout {config.attention_dropout}",
            fix="use --attention-dropout 0, or --cp-comm-type a2a",
        )
    if not is_flash:
        yield ConfigError(
            "attention over several ranks is merged by what the flash kernel returns",
            found=f"{given}, --attention-backend {backend}",
            fix="leave --attention-backend out, or use --cp-comm-type a2a",
        )


def attention_over_ranks(config: ModelConfig, build: ModelBuild) -> AttentionOverRanks | None:
    """Return what replaces a rank's own attention, or None where kernels alone see all keys.

    That is where a rank's queries meet the keys of others, and where heads have sinks.
    """
    if _passes_keys(build):
        passes = build.context_exchange is ContextExchange.P2P
        return AttentionOverRanks(build.ctx.cp, build.share, passes=passes)
    alone = AttentionOverRanks(Group(ranks=(0,), rank=0), SequenceShare(), passes=True)
    return alone if config.has_sinks else None


def _passes_keys(build: ModelBuild) -> bool:
    """Return whether ranks exchange keys, and not tokens for heads."""
    return build.ctx.cp.size > 1 and build.context_exchange is not ContextExchange.A2A
