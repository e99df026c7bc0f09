"""LayerNorm and RMSNorm whose statistics are never computed in half precision.

The output has the dtype of the input; with an fp32 residual stream the caller casts it to the
model's. The gains are replicated over tp. Their gradients are equal there by construction, or under
sequence parallelism, where a norm sees its rank's tokens only, the summands of the true ones.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig, Normalization
from megatron.model.specs import Carry, ModelBuild
from megatron.mpu.partition import Init, InitKind, set_parameter_metadata
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


def build_head_norm(config: ModelConfig, build: ModelBuild) -> "LayerNorm | RMSNorm":
    """Return the config's norm over the channels of one head; a layer's heads share its gain.

    Each tp rank applies it to its own heads, so that its gradients are the summands of the true
    ones, as those of the other norms are under sequence parallelism.
    """
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


def _gain(width: int, init: Init, sequence_parallel: bool, dtype: torch.dtype) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(width, dtype=dtype))
    set_parameter_metadata(parameter, init=init, sequence_parallel=sequence_parallel)
    return parameter
