"""The engine of a model in this process: its pool of blocks, and its limits."""

from dataclasses import dataclass

from megatron import log
from megatron.device import free_memory_bytes
from megatron.errors import ConfigError
from megatron.inference.cache_size import StepSize, blocks_that_fit
from megatron.inference.forward import model_block_bytes
from megatron.inference.paged_cache import BLOCK_SIZE, blocks_for, check_blocks_fit
from megatron.inference.pooling import Pooling
from megatron.inference.start import ExecutorOptions, start_executor
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.scheduling.limits import SchedulerLimits
from megatron.serving.engine_thread import EngineThread


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """How much an engine computes and holds at once.

    Attributes:
        length: most tokens of a sequence; None: the positions of the model.
        sequences: that run at once.
        step_tokens: tokens that a step computes.
        blocks: of the cache; None: as many as `sequences` of full length need, and memory has.
    """

    length: int | None = None
    sequences: int = 32
    step_tokens: int = 512
    blocks: int | None = None


def model_engine(
    model: GPTModel,
    ctx: ParallelContext,
    size: EngineSize,
    *,
    max_queued: int,
    pooling: Pooling = Pooling.MEAN,
) -> EngineThread:
    """Return an engine that is not started yet.

    Raises:
        ConfigError: the length is not given and not known, or longer than the model.
        MachineError: there is no room for one sequence, or for the blocks that were asked for.
    """
    limits = _limits(model, ctx, size, max_queued)
    step = StepSize(limits.max_tokens_per_step, limits.max_sequences, limits.max_length)
    started = start_executor(model.eval(), ctx, ExecutorOptions(step=step, blocks=limits.blocks))
    if not started.invariance.holds:
        ways = ", ".join(started.invariance.differences)
        log.warning(f"requests get other bits beside others than alone: {ways}")
    return EngineThread(
        started.executor,
        limits,
        is_batch_invariant=started.invariance.holds,
        pooling=pooling,
    )


def require_one_rank(ranks: int) -> None:
    """Check that the server is started as one process; raises ConfigError otherwise."""
    if ranks > 1:
        raise ConfigError(
            "the server runs on one rank", found=f"{ranks} ranks", fix="start it without torchrun"
        )


def _limits(
    model: GPTModel, ctx: ParallelContext, size: EngineSize, max_queued: int
) -> SchedulerLimits:
    length = model.max_length if size.length is None else size.length
    if length is None or (model.max_length is not None and length > model.max_length):
        raise ConfigError(
            "the length of sequences is not that of the model",
            found=f"--max-model-len {size.length}, {model.max_length} positions",
            fix=f"use --max-model-len {model.max_length or 4096}",
        )
    step_tokens = max(size.step_tokens, size.sequences)
    if model.prompt_is_prefix:  # beside a token of each other sequence
        step_tokens = max(step_tokens, length + size.sequences)
    blocks = size.blocks
    if blocks is None:
        step = StepSize(step_tokens, size.sequences, length)
        fitting = blocks_that_fit(model, ctx, step)
        wanted = size.sequences * blocks_for(length, BLOCK_SIZE)
        blocks = wanted if fitting is None else min(wanted, fitting)
    else:
        of_one = model_block_bytes(model, ctx)
        check_blocks_fit(blocks, of_one, free_memory_bytes(), what=f"--cache-blocks {blocks}")
    return SchedulerLimits(
        blocks=blocks,
        block_size=BLOCK_SIZE,
        max_length=length,
        vocab_size=model.build.vocab.true,
        max_tokens_per_step=step_tokens,
        max_sequences=size.sequences,
        max_queued=max_queued,
        prompt_is_prefix=model.prompt_is_prefix,
    )
