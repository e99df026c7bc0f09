"""What a model is made of before anything is built: a list of `LayerSpec`, and what building needs.

A layer takes a carry and returns a carry, so that a pipeline may cut the list anywhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.precision import PrecisionConfig
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams

Carry = tuple[Tensor, ...]
"""What one layer hands to the next; all tensors, so that it can cross a pipeline boundary."""


class VocabSize(NamedTuple):
    """How many tokens there are, and how many rows the tables have so that tp divides them."""

    true: int
    padded: int


class Span(NamedTuple):
    """The layers [start, stop) of a list of specs."""

    start: int
    stop: int

    @classmethod
    def whole(cls, specs: Sequence["LayerSpec"]) -> "Span":
        """The span of all layers."""
        return cls(0, len(specs))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer not built yet: its name in every checkpoint, and how to build it.

    A module is built once per stage under its name; a later spec of the same name uses that one.
    `call` says which method this position in the list uses.

    `tied` is the global name of the module whose weights this layer shares with every other layer
    of the same `tied`: the parameters whose names start with it are one set of weights, wherever
    the layers are built.
    """

    name: str
    build: Callable[[], nn.Module]
    tied: str | None = None
    call: str = "forward"


@dataclass(frozen=True, slots=True)
class ModelBuild:
    """What the layers of one rank need beside the shape of the network."""

    ctx: ParallelContext
    vocab: VocabSize
    seq_length: int  # the longest training sequence, and the rows of an unsized position table
    streams: RandomStreams
    precision: PrecisionConfig
    recompute: bool = False  # keep only each block's input, and compute it again in backward

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        dtype: torch.dtype = getattr(torch, self.precision.precision.value)
        return dtype
