"""The start of an engine's tensor side: blocks by what is free, then the probe of equal bits."""

from dataclasses import dataclass
from typing import NamedTuple

from megatron.errors import ConfigError
from megatron.inference.cache_size import StepSize, blocks_that_fit
from megatron.inference.forward import ForwardExecutor
from megatron.inference.invariance import (
    BatchInvariance,
    probe_batch_invariance,
    require_batch_invariance,
)
from megatron.inference.paged_cache import BLOCK_SIZE
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """What an engine is started with.

    Attributes:
        step: the largest step that will be planned; its length is that of the longest sequence.
        blocks: of the pool; None: as many as fit into the free memory of every rank.
        batch_invariant: see `ForwardExecutor`.
        deterministic: refuse to start where the probe finds that a sequence would get other bits
            beside others.
        draws_alone: see `ForwardExecutor`.

    Raises:
        ConfigError: deterministic without batch_invariant.
    """

    step: StepSize
    blocks: int | None = None
    block_size: int = BLOCK_SIZE
    batch_invariant: bool = True
    deterministic: bool = False
    draws_alone: bool = False

    def __post_init__(self) -> None:
        if self.deterministic and not self.batch_invariant:
            raise ConfigError(
                "deterministic scores need products and attention that do not depend on the batch",
                found="deterministic=True, batch_invariant=False",
                fix="use batch_invariant=True",
            )


class StartedExecutor(NamedTuple):
    """An executor that is ready, and what its probe found."""

    executor: ForwardExecutor
    invariance: BatchInvariance


def start_executor(
    model: GPTModel, ctx: ParallelContext, options: ExecutorOptions
) -> StartedExecutor:
    """Return an executor of a model in evaluation mode; all ranks that share it call this together.

    Raises:
        ConfigError: no number of blocks was given, and the free memory is unknown.
        MachineError: there is no room for one sequence of full length.
        NumericsError: `deterministic` was asked for, and does not hold.
    """
    blocks = options.blocks
    if blocks is None:
        blocks = blocks_that_fit(model, ctx, options.step, block_size=options.block_size)
    if blocks is None:
        raise ConfigError(
            "how many blocks of keys and values fit is unknown on this system",
            found="blocks=None, and no figure of free memory",
            fix="give a number of blocks, such as 1000",
        )
    executor = ForwardExecutor(
        model,
        ctx,
        blocks=blocks,
        block_size=options.block_size,
        batch_invariant=options.batch_invariant,
        draws_alone=options.draws_alone,
    )
    invariance = probe_batch_invariance(executor, model, ctx)
    if options.deterministic:
        require_batch_invariance(invariance)
    return StartedExecutor(executor, invariance)
