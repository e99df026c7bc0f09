"""A model before it is built: a list of `LayerSpec`, the inputs of building it, its cost.

A layer takes a carry and returns a carry, so that a pipeline may cut the list anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.activations import ActivationPolicy
from megatron.config.fp8 import Fp8Config
from megatron.config.parallel import ContextExchange
from megatron.config.precision import PrecisionConfig
from megatron.config.training import AttentionBackend
from megatron.model.activations import ActivationMemory
from megatron.model.compilation import LayerCompiler
from megatron.mpu.context import ParallelContext
from megatron.mpu.context_parallel.shares import SequenceShare
from megatron.mpu.linear_cross_entropy import LossState
from megatron.mpu.random import RandomStreams

Carry = tuple[Tensor, ...]
"""The tensors that one layer passes to the next; only tensors can cross a pipeline boundary."""


class VocabSize(NamedTuple):
    """The number of tokens, and the number of rows of the tables, which tp divides."""

    true: int
    padded: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer not built yet: its global name, and how to build it.

    A module is built once per stage under its name; a later spec of the same name uses that one.
    `call` is the method that this position in the list uses.

    `tied` is the global name of the module whose weights this layer shares with every other layer
    of the same `tied`: the parameters whose names start with it are one set of weights, wherever
    the layers are built.

    `memory` carries out the run's policy for what blocks save: recompute it, offload it.

    `block` marks the layers that `--num-layers` counts, which pipeline stages share out; a layer
    that `ends_stack` stays on the stage of the last one before it.

    `around` calls the layer at this position with its part of the carry; None: with all of it.
    """

    name: str
    build: Callable[[], nn.Module]
    tied: str | None = None
    call: str = "forward"
    block: bool = False
    ends_stack: bool = False
    memory: ActivationMemory | None = None
    around: Callable[[Callable[[Carry], Carry], Carry], Carry] | None = None


@dataclass(frozen=True, slots=True)
class TokenFlops:
    """Matrix-multiplication FLOPs of one token's forward and backward pass.

    Attributes:
        model: what the model needs, by the convention of its task: the numerator of the MFU.
        causal: the same with only those scores of attention that a causal mask and a sliding
            window leave, as Megatron-LM has counted since 2025.
        hardware: `model`, and what is computed again in the backward pass: the numerator of the HFU
            (Korthikanti et al. 2022, arXiv 2205.05198, section 6).
    """

    model: int
    causal: int
    hardware: int


@dataclass(slots=True)
class RouterLoss:
    """The channel between the engine and the routers of this rank.

    `value` is the factor on the losses of routers. The engine sets it before a step, when the
    divisor of the task's loss is known; None: not set.
    """

    value: Tensor | float | None = None
    _balance: Tensor | None = None

    def note(self, balance: Tensor) -> None:
        """Add the loss of one layer in one backward pass, a sum over sequences: a scalar."""
        self._balance = balance if self._balance is None else self._balance + balance

    def taken(self) -> Tensor | None:
        """Return the sum of the losses noted since the last call; None where there are none."""
        balance, self._balance = self._balance, None
        return balance


@dataclass(frozen=True, slots=True)
class ModelBuild:
    """The dependencies of one rank's layers, beside the shape of the network."""

    ctx: ParallelContext
    vocab: VocabSize
    seq_length: int  # the longest training sequence, and the rows of an unsized position table
    streams: RandomStreams
    precision: PrecisionConfig
    sequence_parallel: bool = False  # hidden states between layers are [s/tp, b, h]; needs tp > 1
    tp_comm_overlap: bool = False  # matrices compute with parts of it while others travel
    context_exchange: ContextExchange = ContextExchange.P2P  # of ranks that share a sequence
    activations: ActivationPolicy = ActivationPolicy()  # what is kept of them for backward
    virtual_stages: int = 1  # of the whole pipeline, each with layers of its own to recompute
    router_loss: RouterLoss = field(default_factory=RouterLoss)  # one for all layers
    loss_state: LossState = field(default_factory=LossState)  # of the language model
    # Whether the list of a GPT ends without logits, in the operands of a loss that makes its own.
    fuse_loss: bool = False
    attention_backend: AttentionBackend = AttentionBackend.AUTO
    overlap_shared_expert: bool = False  # with the exchange of tokens for experts
    fuse_rope: bool = True  # else by PyTorch's own operations
    fuse_gated_units: bool = True  # likewise
    fuse_dropout: bool = True  # likewise
    # Whether ranks that share experts out compute the same tokens, as in text generation.
    repeats_tokens: bool = False
    compiler: LayerCompiler | None = None  # of blocks, for all of them; None: they run eager
    fp8: Fp8Config | None = None  # of the linear layers of blocks; None: in the model's precision

    def of_block(self, layer: int, num_layers: int) -> "ModelBuild":
        """Return the same for the transformer layer `layer`, which may stay out of FP8."""
        if self.fp8 is None or self.fp8.has_layer(layer, num_layers):
            return self
        return replace(self, fp8=None)

    @property
    def share(self) -> SequenceShare:
        """The tokens of a sequence that this rank holds under context parallelism, else all."""
        paired = self.context_exchange is not ContextExchange.A2A
        return SequenceShare(self.ctx.cp.rank, self.ctx.cp.size, paired)

    @property
    def memory(self) -> ActivationMemory:
        """What keeps the activations of transformer layers, for their specs."""
        return ActivationMemory(self.activations, self.streams, self.ctx.tp)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        dtype: torch.dtype = getattr(torch, self.precision.precision.value)
        return dtype

    @property
    def stream_dtype(self) -> torch.dtype:
        """Dtype of hidden states between layers."""
        return torch.float32 if self.precision.fp32_residual_connection else self.dtype
