"""What the device that computes holds beside weights: blocks of keys and values, and a step."""

from dataclasses import dataclass

from megatron.inference.cache_size import StepSize, step_bytes
from megatron.inference.forward import model_block_bytes
from megatron.inference.offload.placement import WorkingBytes
from megatron.inference.paged_cache import BLOCK_SIZE, blocks_for
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext

_SHARE = 4  # of its memory a device gives at most one part to blocks whose number is not given


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDemand:
    """What is generated at a time.

    Attributes:
        sequences: that are generated together.
        length: of the longest; None: the positions of the model.
        step_tokens: that a step computes.
        blocks: of the cache; None: as many as those sequences need, but no more than a quarter of
            the memory, or one sequence.
    """

    sequences: int
    length: int | None = None
    step_tokens: int = 512
    blocks: int | None = None


def cache_blocks(model: GPTModel, ctx: ParallelContext, demand: CacheDemand, memory: int) -> int:
    """Return how many blocks of keys and values are held on a device of `memory` bytes."""
    if demand.blocks is not None:
        return demand.blocks
    of_one = blocks_for(_length(model, demand))
    share = memory // _SHARE // model_block_bytes(model, ctx) - 1
    return max(of_one, min(demand.sequences * of_one, share))


def working_bytes(
    model: GPTModel, ctx: ParallelContext, demand: CacheDemand, memory: int
) -> WorkingBytes:
    """Return the bytes of blocks, with the block of zeros, and of the largest step."""
    blocks = cache_blocks(model, ctx, demand, memory) + 1
    tokens = max(demand.step_tokens, demand.sequences)
    length = min(_length(model, demand), blocks * BLOCK_SIZE)
    step = step_bytes(
        model.config,
        StepSize(tokens, demand.sequences, length),
        tp=ctx.tp.size,
        vocabulary=model.build.vocab.padded,
        dtype=model.build.dtype,
    )
    return WorkingBytes(blocks * model_block_bytes(model, ctx), step)


def _length(model: GPTModel, demand: CacheDemand) -> int:
    return demand.length or model.max_length or model.build.seq_length
