"""The feed-forward half of a block: plain, or with a gated linear unit."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import Activation, ModelConfig
from megatron.model.init import residual_init, weight_init
from megatron.model.specs import ModelBuild
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """fc2(act(fc1(x))), or with a gated unit fc2(act(gate) * up) where [gate; up] = fc1(x).

    The gate is the first half of fc1 (Shazeer 2020, arXiv 2002.05202, eq. 6 order as in LLaMA);
    bigscience's GLU has the activation on the second half. fc1 is one matrix of two blocks, each
    split evenly over tp, so every rank holds matching parts of gate and up.
    """

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__()
        self._gated = config.glu is not None
        self._activation = ACTIVATIONS[config.activation]
        halves = 2 if self._gated else 1
        self.fc1 = ColumnParallelLinear(
            config.hidden_size,
            halves * config.ffn_width,
            ctx=build.ctx,
            bias=config.add_bias_linear,
            init=weight_init(config),
            sequence_parallel=build.sequence_parallel,
            blocks=halves,
            dtype=build.dtype,
        )
        self.fc2 = RowParallelLinear(
            config.ffn_width,
            config.hidden_size,
            ctx=build.ctx,
            bias=config.add_bias_linear,
            init=residual_init(config),
            sequence_parallel=build.sequence_parallel,
            dtype=build.dtype,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h], or under sequence parallelism [s/tp, b, h] to the same."""
        middle = self.fc1(hidden)  # [s, b, f/tp], or [s, b, 2f/tp] as [gate; up]
        if self._gated:
            gate, up = middle.chunk(2, dim=-1)
            middle = self._activation(gate) * up
        else:
            middle = self._activation(middle)
        output: Tensor = self.fc2(middle)
        return output


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()  # So et al. 2021, arXiv 2109.08668


def _identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
        Activation.GELU_ERF: F.gelu,
        Activation.RELU: torch.relu,
        Activation.SQUARED_RELU: _squared_relu,
        Activation.SILU: F.silu,
        Activation.IDENTITY: _identity,
    }
)
"""What each named activation computes, element by element."""
