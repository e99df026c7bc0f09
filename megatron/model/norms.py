"""LayerNorm and RMSNorm whose statistics are never computed in half precision.

The output has the dtype of the input; with an fp32 residual stream the caller casts it to the
model's. The gains are replicated over tp. Their gradients are equal there by construction, or under
sequence parallelism, where a norm sees its rank's tokens only, the summands of the true ones.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.blocks import QkNormScope
from megatron.config.model import ModelConfig, Normalization
from megatron.model.specs import Carry, ModelBuild
from megatron.mpu.mappings import copy_to_tp, reduce_from_tp
from megatron.mpu.partition import Init, InitKind, Partition, set_parameter_metadata
from megatron.ops.library import statistics_dtype
from megatron.ops.rms_norm import rms_norm


def build_norm(config: ModelConfig, build: ModelBuild) -> "LayerNorm | RMSNorm":
    """Return the normalisation of `config` over the hidden dimension."""
    kind = RMSNorm if config.normalization is Normalization.RMS_NORM else LayerNorm
    return kind(
        config.hidden_size,
        epsilon=config.layernorm_epsilon,
        sequence_parallel=build.sequence_parallel,
        dtype=build.dtype,
    )


def build_head_norm(
    config: ModelConfig, build: ModelBuild, *, heads: int
) -> "LayerNorm | RMSNorm | NormOfAllHeads":
    """Return the config's norm of queries or keys, [.., heads on this rank, d], of `heads` heads.

    It is over the channels of one head, whose gain the heads of a layer share: each tp rank applies
    it to its own heads, so that its gradients are the summands of the true ones, as those of the
    other norms are under sequence parallelism. Or it is over the channels of all heads together.
    """
    if config.qk_layernorm_scope is QkNormScope.ALL_HEADS:
        return NormOfAllHeads(config, build, heads=heads)
    kind = RMSNorm if config.normalization is Normalization.RMS_NORM else LayerNorm
    return kind(
        config.head_width,
        epsilon=config.layernorm_epsilon,
        sequence_parallel=build.ctx.tp.size > 1,
        dtype=build.dtype,
    )


class _Norm(nn.Module):
    """The base of both norms: the last norm of a model is also a layer of its own."""

    weight: nn.Parameter

    def final(self, carry: Carry) -> Carry:
        """Normalise [s, b, h] (or [s/tp, b, h]) to the model's dtype, as the head needs."""
        return (self(carry[0]).to(self.weight.dtype),)

    def final_of_encoder(self, carry: Carry) -> Carry:
        """Normalise as `final` does; (hidden, padding mask, decoder tokens, ..) lose the rest."""
        return (*self.final(carry), *carry[1:3])


class LayerNorm(_Norm):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias (Ba et al. 2016, arXiv 1607.06450).

    torch's kernels accumulate half-precision inputs in fp32.
    """

    def __init__(
        self, width: int, *, epsilon: float, sequence_parallel: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.width, self.epsilon = width, epsilon
        self.weight = _gain(width, Init(InitKind.ONES), sequence_parallel, dtype)
        self.bias = _gain(width, Init(InitKind.ZEROS), sequence_parallel, dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last dimension of [.., width]."""
        weight, bias = self.weight.to(hidden.dtype), self.bias.to(hidden.dtype)
        return F.layer_norm(hidden, (self.width,), weight, bias, self.epsilon)


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019, arXiv 1910.07467).

    The operator computes half-precision inputs in fp32 and rounds once, at the end.
    """

    def __init__(
        self, width: int, *, epsilon: float, sequence_parallel: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.width, self.epsilon = width, epsilon
        self.weight = _gain(width, Init(InitKind.ONES), sequence_parallel, dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last dimension of [.., width]."""
        return rms_norm(hidden, self.weight.to(hidden.dtype), self.epsilon)


class NormOfAllHeads(nn.Module):
    """The config's norm over the channels of all heads of a token (OLMo 2, arXiv 2501.00656).

    Heads and gains are split over tp; sums of each token's channels go over the ranks.
    """

    def __init__(self, config: ModelConfig, build: ModelBuild, *, heads: int) -> None:
        super().__init__()
        self._tp, self._count = build.ctx.tp, heads * config.head_width
        self._epsilon = config.layernorm_epsilon
        own, split = self._count // self._tp.size, Partition("tp", dim=0)
        self.weight = nn.Parameter(torch.empty(own, dtype=build.dtype))
        set_parameter_metadata(self.weight, init=Init(InitKind.ONES), partition=split)
        self.bias: nn.Parameter | None = None
        if config.normalization is Normalization.LAYER_NORM:
            self.bias = nn.Parameter(torch.empty(own, dtype=build.dtype))
            set_parameter_metadata(self.bias, init=Init(InitKind.ZEROS), partition=split)

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise [s, b, g/tp, n, d], the heads of this rank, to the same."""
        rows = heads.flatten(2)
        if self._tp.size == 1 and self.bias is None:
            return rms_norm(rows, self.weight, self._epsilon).view_as(heads)
        wide = rows.to(statistics_dtype(rows))
        if self.bias is not None:
            wide = wide - self._mean(wide)
        wide = wide * torch.rsqrt(self._mean(wide.square()) + self._epsilon) * self.weight
        wide = wide if self.bias is None else wide + self.bias
        return wide.to(heads.dtype).view_as(heads)

    def _mean(self, rows: Tensor) -> Tensor:
        """Return the mean of each row over the ranks, [.., 1]; every rank uses it for its part."""
        total = reduce_from_tp(rows.sum(-1, keepdim=True), self._tp)
        return copy_to_tp(total, self._tp) / self._count


def _gain(width: int, init: Init, sequence_parallel: bool, dtype: torch.dtype) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(width, dtype=dtype))
    set_parameter_metadata(parameter, init=init, sequence_parallel=sequence_parallel)
    return parameter
