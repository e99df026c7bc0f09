"""One transformer block, and the parts of it for selective recomputation.

The residual stream is the model's dtype, or fp32 on request; attention and the MLP always get
and give the model's dtype.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from megatron.config.activations import RecomputeModule
from megatron.config.model import ModelConfig
from megatron.model.attention import SelfAttention
from megatron.model.dropout import HiddenDropout
from megatron.model.experts.mixture import build_feed_forward
from megatron.model.geometry import AttentionGeometry, Geometry
from megatron.model.norms import build_norm
from megatron.model.specs import Carry, LayerSpec, ModelBuild
from megatron.mpu.recompute import forgetting, recompute


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (pre-norm: GPT-2; Xiong et al., 2002.04745).

    Or side by side, x + attention(norm(x)) + mlp(other norm(x)) (GPT-NeoX: 2204.06745, sec. 2.1).
    Norms may stand after the branches instead, x + norm(attention(x)) (OLMo 2, arXiv 2501.00656,
    section 3), or on both sides of them (Gemma 2, arXiv 2408.00118, section 2). What a branch adds
    may be multiplied by one number.

    Args:
        place: what stands before the names of places where it drops; those of an encoder and of a
            decoder differ.
    """

    def __init__(
        self,
        config: ModelConfig,
        build: ModelBuild,
        geometry: AttentionGeometry,
        *,
        layer: int,
        place: str = "",
    ) -> None:
        super().__init__()
        build = build.of_block(layer, config.num_layers)
        self.geometry = geometry
        self._build, self._recomputed = build, build.activations.modules
        self._dtype = build.dtype
        self._side_by_side = config.use_parallel_residual
        self._residual_after_norm = config.apply_residual_connection_post_layernorm
        self._multiplier = config.residual_multiplier
        self.input_norm, self.attention_output_norm = norms_of_branch(config, build)
        self.attention = SelfAttention(config, build, layer=layer, place=f"{place}attention")
        self.post_attention_norm, self.mlp_output_norm = norms_of_branch(config, build)
        self.mlp = build_feed_forward(config, build, layer=layer)
        self.attention_dropout, self.mlp_dropout = (
            HiddenDropout(config.hidden_dropout, build, f"{place}layer", layer, after)
            for after in ("attention", "mlp")
        )

    def forward(self, carry: Carry) -> Carry:
        """Map (hidden [s, b, h], position ids?, document ids?, prefixes?) to the same, later.

        Under sequence parallelism hidden is [s/tp, b, h]; the ids are whole. A geometry of its own
        may read other ids.
        """
        hidden, *ids = carry
        geometry = self.geometry.of_carry(hidden, ids)
        numbers = self.attention_dropout.numbers_for(hidden)
        return (self._run(Block._transform, hidden, geometry, numbers), *ids)

    def _run(self, function: Callable[..., Tensor], hidden: Tensor, *inputs: object) -> Tensor:
        """Return a method of `hidden` and other inputs, as a graph where layers are compiled."""
        compiler = self._build.compiler
        if compiler is not None and self.training and compiler.takes(hidden):
            return compiler.run(function, self, hidden, *inputs)
        return function(self, hidden, *inputs)

    def _transform(self, hidden: Tensor, geometry: Geometry, numbers: Tensor | None) -> Tensor:
        """Return the hidden states one layer later; numbers of tokens are those of dropout."""
        after = self._after_attention(hidden, geometry, numbers)
        return self._after_mlp(hidden if self._side_by_side else after, after, numbers)

    def _after_attention(
        self, hidden: Tensor, geometry: Geometry, numbers: Tensor | None
    ) -> Tensor:
        """Return the residual stream with what attention adds to it."""
        result, residual = self._branch(
            self.input_norm, lambda x: self.attention(x, geometry), hidden, hidden
        )
        result = self._finished(result, self.attention_output_norm)
        after: Tensor = self.attention_dropout(result, residual, numbers)
        return after

    def _after_mlp(self, read: Tensor, stream: Tensor, numbers: Tensor | None) -> Tensor:
        """Return the residual stream with what the MLP, which reads `read`, adds to it."""
        result, residual = self._branch(self.post_attention_norm, self._feed_forward, read, stream)
        result = self._finished(result, self.mlp_output_norm)
        last: Tensor = self.mlp_dropout(result, residual, numbers)
        return last

    def _branch(
        self,
        norm: nn.Module | None,
        branch: Callable[[Tensor], Tensor],
        hidden: Tensor,
        stream: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of `branch` on the normed `hidden`, and what it is added to."""
        normed = hidden if norm is None else norm(hidden)
        given = normed.to(self._dtype)
        with self._keeping(norm, hidden, given):
            result = branch(given)
        return result, normed if self._residual_after_norm else stream

    def _finished(self, result: Tensor, norm: nn.Module | None) -> Tensor:
        """Return what is added to the residual stream for the output of a branch."""
        normed: Tensor = result if norm is None else norm(result)
        return normed if self._multiplier == 1.0 else normed * self._multiplier

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        if self.training and RecomputeModule.MLP in self._recomputed:
            output: Tensor = recompute(self.mlp, self._build.streams, hidden)
        else:
            output = self.mlp(hidden)
        return output

    def _keeping(
        self, norm: nn.Module | None, hidden: Tensor, given: Tensor
    ) -> AbstractContextManager[None]:
        """Return a context that saves no norm output, where the policy recomputes it."""
        if norm is None or not (self.training and RecomputeModule.LAYERNORM in self._recomputed):
            return nullcontext()
        before, dtype = hidden.detach(), given.dtype  # the norm keeps `before` in any case
        return forgetting(given, lambda: norm(before).to(dtype))


class LayerBuilder(Protocol):
    """Builds one block of a stack."""

    def __call__(self, *, layer: int) -> nn.Module:
        """Return the block of that number, from 0."""


def block_layers(
    block: LayerBuilder, count: int, build: ModelBuild, *, stack: str = ""
) -> tuple[LayerSpec, ...]:
    """Return the blocks of a stack, `layers.0` and so on.

    Args:
        stack: what stands before these names, with its dot, where a model has several stacks.
    """
    return tuple(
        LayerSpec(f"{stack}layers.{i}", partial(block, layer=i), block=True, memory=build.memory)
        for i in range(count)
    )


def norms_of_branch(
    config: ModelConfig, build: ModelBuild
) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the norm before a branch of a block, and that after it."""
    place = config.norm_placement
    return (
        build_norm(config, build) if place.is_before else None,
        build_norm(config, build) if place.is_after else None,
    )
