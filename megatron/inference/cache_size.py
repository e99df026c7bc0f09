"""How many blocks of keys and values fit beside the weights and the largest step: arithmetic.

Bytes of a step are bounded from above, by what its widest layers hold at once.
"""

from dataclasses import dataclass

import torch

from megatron import device
from megatron.config.model import ModelConfig
from megatron.errors import MachineError
from megatron.host import in_gib
from megatron.inference.attention_plan import KEY_MULTIPLE, MOST_KEYS, padded_to
from megatron.inference.forward import SCORED_TOGETHER, model_block_bytes
from megatron.inference.paged_cache import BLOCK_SIZE, blocks_for
from megatron.inference.weight_quantization import dense_bytes
from megatron.model.gpt_model import GPTModel
from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import ParallelContext


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step that an engine plans.

    Attributes:
        tokens: computed together.
        sequences: of which each may sample; with proposed tokens, the draws of a step.
        length: of the longest sequence.
    """

    tokens: int
    sequences: int
    length: int


def step_bytes(
    config: ModelConfig, size: StepSize, *, tp: int, vocabulary: int, dtype: torch.dtype
) -> int:
    """Return an upper bound of the bytes that a step holds beside weights and pool.

    Args:
        vocabulary: with padding.
    """
    wide = max(4, dtype.itemsize)
    heads, groups = config.num_attention_heads // tp, config.query_groups // tp
    keys = padded_to(size.length, KEY_MULTIPLE)
    stream = 8 * config.hidden_size
    projected = 4 * (heads + 2 * groups) * config.head_width
    halves = 1 if config.glu is None else 2
    middle = (halves + 2) * config.ffn_width // tp
    if config.num_experts is not None:
        of_expert = (halves + 2) * config.expert_width // tp + 3 * config.hidden_size
        middle += config.moe_router_topk * of_expert + 4 * config.num_experts
    of_tokens = (size.tokens + 4) * (stream + projected + middle) * wide
    # Gathered, and changed by samplers, in float32; cumulated in float64, with indexes beside.
    rows = size.sequences + SCORED_TOGETHER + 4
    of_scores = rows * vocabulary * (2 * dtype.itemsize + 4 * 4 + 8 + 8)
    read = 2 * max(MOST_KEYS, keys) * groups * config.head_width * dtype.itemsize
    # Biases of layers with windows and of those without, and what makes them.
    of_heads = heads if config.position_embedding_type == "alibi" else 1
    biases = (size.tokens + 8) * keys * (4 * wide * of_heads + 8 + 2)
    scores = 0
    if config.attention_soft_cap is not None:
        scores = 4 * (size.tokens + 8) * heads * keys * wide
        scores += 2 * read * config.num_attention_heads // config.query_groups
    return of_tokens + of_scores + read + biases + scores


def blocks_that_fit(
    model: GPTModel,
    ctx: ParallelContext,
    size: StepSize,
    *,
    block_size: int = BLOCK_SIZE,
    draft_block_bytes: int = 0,
) -> int | None:
    """Return how many blocks fit into the memory that is free on every rank, equal on all.

    All ranks that share the model call it together, with the weights in their place. None: the
    free memory is unknown.

    Args:
        draft_block_bytes: of a draft model, which has as many blocks.

    Raises:
        MachineError: there is no room for one sequence of `size.length` tokens.
    """
    model.row_products()  # with the copy of weights that they may keep
    free = device.free_memory_bytes()
    reserved = step_bytes(
        model.config,
        size,
        tp=ctx.tp.size,
        vocabulary=model.build.vocab.padded,
        dtype=model.build.dtype,
    )
    reserved += dense_bytes(model)
    if model.is_stage:  # hidden states of steps in flight, until the next stage has taken them
        wide = max(4, model.build.dtype.itemsize)
        reserved += 2 * ctx.pp.size * size.tokens * model.config.hidden_size * wide
    of_one = model_block_bytes(model, ctx, block_size) + draft_block_bytes
    unknown = torch.iinfo(torch.int64).max
    # One more is the block of zeros.
    here = unknown if free is None else max(0, free - reserved) // of_one - 1
    found = int(all_reduce(torch.tensor(here, device=device.current()), ctx.whole_model, op="min"))
    if found == unknown:
        return None
    needed = blocks_for(size.length, block_size)
    if found < needed:
        raise MachineError(
            "the keys and values of one sequence do not fit into memory",
            found=f"{needed} blocks of {size.length} tokens take {in_gib(needed * of_one)}, a step "
            f"{in_gib(reserved)}; {in_gib(free or 0)} are free, so that {max(0, found)} blocks fit "
            "on the rank with the least",
            fix=f"allow sequences of at most {max(0, found) * block_size} tokens"
            if found > 0
            else "use more tensor-parallel ranks, or steps of fewer tokens",
        )
    return found
