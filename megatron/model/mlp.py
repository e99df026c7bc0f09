"""The feed-forward half of a block: plain, or with a gated linear unit."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.activations import RecomputeModule
from megatron.config.model import Activation, ModelConfig
from megatron.model.init import residual_init, weight_init
from megatron.model.specs import ModelBuild
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.recompute import forgetting
from megatron.ops.activation import ActivationKind, activate, activation_value, gated_unit


class MLP(nn.Module):
    """fc2(act(fc1(x))), or with a gated unit fc2(act(gate) * up) where [gate; up] = fc1(x).

    The gate is the first half of fc1 (Shazeer 2020, arXiv 2002.05202, eq. 6 order as in LLaMA);
    bigscience's GLU has the activation on the second half. fc1 is one matrix of two blocks, each
    split evenly over tp, so every rank holds matching parts of gate and up.

    Args:
        width: of the middle; None: that of the config's MLPs.
    """

    def __init__(self, config: ModelConfig, build: ModelBuild, *, width: int | None = None) -> None:
        super().__init__()
        width = config.ffn_width if width is None else width
        self._activate = unit_of(config, fused=build.fuse_gated_units)
        modules = build.activations.modules
        # Recomputed with all of the MLP, it would keep its input for nothing.
        self._forgets_activation = (
            RecomputeModule.ACTIVATION in modules and RecomputeModule.MLP not in modules
        )
        halves = 1 if config.glu is None else 2
        self.fc1 = (
            ColumnParallelLinear(
                config.hidden_size,
                halves * width,
                ctx=build.ctx,
                bias=config.add_bias_linear,
                init=weight_init(config),
                sequence_parallel=build.sequence_parallel,
                blocks=halves,
                dtype=build.dtype,
            )
            .in_fp8(build.fp8)
            .on_ring(build.tp_comm_overlap)
        )
        self.fc2 = (
            RowParallelLinear(
                width,
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

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h], or under sequence parallelism [s/tp, b, h] to the same."""
        return self.leave(self.enter(hidden))

    def enter(self, hidden: Tensor) -> Tensor:
        """Return what fc1 makes of [s, b, h]: [s, b, f/tp], or [s, b, 2f/tp] as [gate; up]."""
        middle: Tensor = self.fc1(hidden)
        return middle

    def leave(self, middle: Tensor) -> Tensor:
        """Return the output for what `enter` returned."""
        activated = self._activate(middle)
        with self._keeping(middle, activated):
            output: Tensor = self.fc2(activated)
        return output

    def _keeping(self, middle: Tensor, activated: Tensor) -> AbstractContextManager[None]:
        """Return a context that does not save `activated`, where the policy recomputes it."""
        if not (self.training and self._forgets_activation):
            return nullcontext()
        before = middle.detach()  # which the activation saves in any case
        return forgetting(activated, lambda: self._activate(before))


def unit_of(config: ModelConfig, *, fused: bool) -> Callable[[Tensor], Tensor]:
    """Return what stands between the matrices of an MLP: [.., f], or [.., 2f] gated, to [.., f].

    Where it is one operator, nothing else may read its input: see `activate`.

    Args:
        fused: a gated unit is one operator where there is one, else PyTorch's operations.
    """
    kind = _KERNELS.get(config.activation)
    if config.glu is None:
        if kind is None:
            return ACTIVATIONS[config.activation]
        return partial(activate, kind=kind, consume=True)
    if kind is None:
        activation = ACTIVATIONS[config.activation]
    elif fused and has_fused_unit(config):
        return partial(gated_unit, kind=kind, consume=True)
    else:
        activation = partial(activation_value, kind=kind)
    return partial(
        _gated,
        activation=activation,
        offset=config.glu_linear_offset,
        bound=config.activation_func_clamp_value,
    )


def has_fused_unit(config: ModelConfig) -> bool:
    """Return whether there is one operator for the gated unit of `config`."""
    return config.activation in _KERNELS and config.has_plain_unit


def _gated(
    middle: Tensor, *, activation: Callable[[Tensor], Tensor], offset: float, bound: float | None
) -> Tensor:
    gate, up = middle.chunk(2, dim=-1)
    if bound is not None:
        gate, up = gate.clamp(max=bound), up.clamp(-bound, bound)
    return activation(gate) * (up + offset if offset else up)


def _gelu_sigmoid(hidden: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x) (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2)."""
    return hidden * torch.sigmoid(1.702 * hidden)


# The other two have no kernel of ours.
_KERNELS = {
    Activation.GELU_TANH: ActivationKind.GELU_TANH,
    Activation.RELU: ActivationKind.RELU,
    Activation.SQUARED_RELU: ActivationKind.SQUARED_RELU,
    Activation.SILU: ActivationKind.SILU,
    Activation.IDENTITY: ActivationKind.IDENTITY,
}

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        Activation.GELU_ERF: F.gelu,
        Activation.GELU_SIGMOID: _gelu_sigmoid,
        **{name: partial(activate, kind=kind) for name, kind in _KERNELS.items()},
    }
)
"""What each named activation computes, element by element."""
