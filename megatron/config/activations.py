"""What a forward pass saves for its backward pass: the choices, and which exclude each other.

The flags themselves are fields of `TrainingConfig`; checks that need the number of ranks are in
preflight. This module recomputes nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from sys import maxsize
from typing import Protocol

from megatron.errors import ConfigError

ALL_LAYERS = maxsize  # more than any model has


class RecomputeGranularity(StrEnum):
    """How much of a layer is computed again in the backward pass."""

    FULL = "full"
    SELECTIVE = "selective"


class RecomputeMethod(StrEnum):
    """Which layers of a stage are recomputed, under full recomputation."""

    UNIFORM = "uniform"  # all, in groups that are recomputed as one
    BLOCK = "block"  # the first ones, each by itself


class RecomputeModule(StrEnum):
    """The parts of a layer that selective recomputation supports."""

    CORE_ATTN = "core_attn"  # softmax(q k^T) v, without the matrices around it
    MLP = "mlp"
    ACTIVATION = "act"  # what stands between the matrices of the MLP
    LAYERNORM = "layernorm"


# Their outputs are computed again from what is saved in any case.
FORGOTTEN = (RecomputeModule.LAYERNORM, RecomputeModule.ACTIVATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPolicy:
    """How every virtual stage reduces the memory of activations; not at all by default.

    Args:
        method: None: no whole layers are recomputed.
        num_layers: layers per group (uniform), or layers that are recomputed at all (block).
        modules: parts of every layer that are recomputed; excludes `method`.
        distribute: the inputs of recomputed groups are split over tp until they are needed.
        offload_layers: this many first layers keep what they save in host memory.
    """

    method: RecomputeMethod | None = None
    num_layers: int = 1
    modules: frozenset[RecomputeModule] = frozenset()
    distribute: bool = False
    offload_layers: int = 0


class _Flags(Protocol):
    """The fields of `TrainingConfig` that are about activations."""

    @property
    def recompute_granularity(self) -> RecomputeGranularity | None: ...
    @property
    def recompute_method(self) -> RecomputeMethod | None: ...
    @property
    def recompute_num_layers(self) -> int | None: ...
    @property
    def recompute_modules(self) -> tuple[RecomputeModule, ...] | None: ...
    @property
    def distribute_saved_activations(self) -> bool: ...
    @property
    def cpu_offloading_num_layers(self) -> int: ...
    @property
    def checkpoint_in_cpu(self) -> bool: ...


def activation_problems(flags: _Flags) -> Iterator[ConfigError]:
    """Yield the contradictions in the flags about activations."""
    granularity = flags.recompute_granularity
    of_full = {
        "--recompute-method": flags.recompute_method,
        "--recompute-num-layers": flags.recompute_num_layers,
        "--distribute-saved-activations": flags.distribute_saved_activations or None,
    }
    given = [name for name, value in of_full.items() if value is not None]
    if given and granularity is not RecomputeGranularity.FULL:
        yield ConfigError(
            "a flag about layers that are recomputed as a whole was given, and none are",
            found=f"{' '.join(given)} {_shown(granularity)}",
            fix="add --recompute-granularity full, or leave it out",
        )
    if flags.recompute_modules is not None and granularity is not RecomputeGranularity.SELECTIVE:
        yield ConfigError(
            "modules to recompute were named, but recomputation is not selective",
            found=f"{_modules(flags.recompute_modules)} {_shown(granularity)}",
            fix="add --recompute-granularity selective, or leave --recompute-modules out",
        )
    offloaded, modules = flags.cpu_offloading_num_layers, flags.recompute_modules or ()
    shown = "--checkpoint-in-cpu" if flags.checkpoint_in_cpu else "--cpu-offloading-num-layers"
    forgotten = [module for module in FORGOTTEN if module in modules]
    if (offloaded > 0 or flags.checkpoint_in_cpu) and forgotten:
        yield ConfigError(
            "an output cannot be both recomputed and kept in host memory",
            found=f"{_modules(modules)}, {shown}" + (f" {offloaded}" if offloaded else ""),
            fix=f"leave {' and '.join(forgotten)} out of --recompute-modules, or {shown}",
        )
    if offloaded > 0 and flags.checkpoint_in_cpu:
        yield ConfigError(
            "layers whose activations wait in host memory were named twice",
            found=f"--checkpoint-in-cpu, --cpu-offloading-num-layers {offloaded}",
            fix="keep one of the two: --checkpoint-in-cpu is about all layers",
        )


def _shown(granularity: RecomputeGranularity | None) -> str:
    return f"with --recompute-granularity {granularity}" if granularity else "without recomputation"


def _modules(modules: tuple[RecomputeModule, ...]) -> str:
    return " ".join(["--recompute-modules", *modules])
