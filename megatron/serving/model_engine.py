"""The engine of a model in this process: its pool of blocks, its limits, and scores of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron import log
from megatron.device import current, free_memory_bytes
from megatron.errors import ConfigError
from megatron.inference.cache_size import StepSize, blocks_that_fit
from megatron.inference.forward import model_block_bytes
from megatron.inference.logprobs import token_logprobs
from megatron.inference.paged_cache import BLOCK_SIZE, blocks_for, check_blocks_fit
from megatron.inference.start import ExecutorOptions, start_executor
from megatron.launch import Launch
from megatron.model.gpt_model import GPTModel, gpt_carry
from megatron.model.stage import run_layers
from megatron.mpu.collectives import all_gather, all_reduce
from megatron.mpu.context import ParallelContext
from megatron.scheduling.limits import SchedulerLimits
from megatron.serving.engine_client import TokenScore
from megatron.serving.engine_thread import (
    SCORE_PROMPT,
    EngineThread,
    PromptScorer,
    queue_limits,
)
from megatron.serving.ranks.follower import Follower
from megatron.serving.ranks.rank_model import LoadWeights, RankModel
from megatron.serving.ranks.round_log import GroupLog, engine_group

_SCORED_TOGETHER = 256  # tokens of a prompt


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
    load: LoadWeights | None = None,
) -> EngineThread | Follower:
    """Return an engine that is not started yet; on its ranks but the first, what follows it.

    All ranks that share the model call this together.

    Args:
        load: returns a model like this one with the weights of a folder, called by all ranks.

    Raises:
        ConfigError: the length is not given and not known, or longer than the model, or the model
            is a prefix LM.
        MachineError: there is no room for one sequence, or for the blocks that were asked for.
    """
    if model.prompt_is_prefix:
        raise ConfigError(
            "the server does not serve prefix LMs: it computes prompts in parts",
            found="a model whose prompts are seen in both directions",
            fix="use tools/generate_text.py",
        )
    limits = _limits(model, ctx, size, max_queued)
    step = StepSize(limits.max_tokens_per_step, limits.max_sequences, limits.max_length)
    options = ExecutorOptions(step=step, blocks=limits.blocks, draws_alone=True)
    started = start_executor(model.eval(), ctx, options)
    executor = started.executor
    of_rank = RankModel(model, executor.cache, load=load, on_new_weights=executor.take_new_weights)
    ranks, score_prompt = GroupLog(engine_group(ctx)), prompt_scorer(model, ctx)
    if not ranks.leads:
        return Follower(
            executor,
            queue_limits(limits),
            functions={SCORE_PROMPT: score_prompt},
            receive=ranks.receive,
            model=of_rank,
        )
    if not started.invariance.holds:
        ways = ", ".join(started.invariance.differences)
        log.warning(f"requests get other bits beside others than alone: {ways}")
    return EngineThread(
        executor,
        limits,
        score_prompt=score_prompt,
        is_batch_invariant=started.invariance.holds,
        ranks=ranks,
        model=of_rank,
    )


def check_engine_ranks(launch: Launch, *, tp: int, ep: int) -> None:
    """Check that the ranks of a launch are whole replicas on one machine.

    Raises:
        ConfigError: they are not.
    """
    ranks = launch.world_size
    if launch.local_world_size != ranks:  # the control plane does not leave the machine
        raise ConfigError(
            "the ranks of the server are on several machines",
            found=f"{launch.local_world_size} of {ranks} ranks on this one",
            fix="start a server on each machine, and share requests out in front of them",
        )
    if tp > 1 and ep > 1:  # its ranks would give experts the same tokens twice
        raise ConfigError(
            "the server does not combine tensor and expert parallelism",
            found=f"--tensor-model-parallel-size {tp}, --expert-model-parallel-size {ep}",
            fix=f"use one of them: --tensor-model-parallel-size {tp} also splits each expert",
        )
    if ranks % (tp * ep):
        raise ConfigError(
            "the ranks of the server are no whole replicas of the model",
            found=f"{ranks} ranks, --tensor-model-parallel-size {tp}, "
            f"--expert-model-parallel-size {ep}",
            fix=f"start {tp * ep} ranks for each replica",
        )


def prompt_scorer(model: GPTModel, ctx: ParallelContext) -> PromptScorer:
    """Return what scores all tokens of a prompt but the first, in one pass without a cache.

    Scores over the vocabulary are in memory for a part of the prompt at a time. All ranks that
    share the model call it together.
    """

    @torch.no_grad()
    def score(prompt: Sequence[int], top: int) -> tuple[TokenScore, ...]:
        if len(prompt) < 2:
            return ()
        tokens = torch.tensor([prompt[:-1]], device=current())
        (hidden,) = run_layers(model, model.specs[:-2], gpt_carry(tokens))[:1]  # [s, 1, h]
        scores: list[TokenScore] = []
        for start in range(0, len(prompt) - 1, _SCORED_TOGETHER):
            part = hidden[start : start + _SCORED_TOGETHER]
            (logits,) = run_layers(model, model.specs[-2:], (part,))
            rows = all_gather(logits[:, 0], ctx.tp, dim=-1)[:, : model.build.vocab.true]
            following = prompt[start + 1 : start + 1 + len(rows)]
            found = token_logprobs(rows, following, [top] * len(rows))
            scores += [TokenScore(each.chosen, each.top) for each in found]
        return tuple(scores)

    return score


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
    blocks = size.blocks
    if blocks is None:
        step = StepSize(size.step_tokens, size.sequences, length)
        fitting = blocks_that_fit(model, ctx, step)
        wanted = size.sequences * blocks_for(length, BLOCK_SIZE)
        here = torch.tensor(wanted if fitting is None else min(wanted, fitting))
        # Equal on all replicas: a request that one can serve, any other can.
        blocks = int(all_reduce(here.to(current()), ctx.world, op="min"))
    else:
        of_one = model_block_bytes(model, ctx)
        check_blocks_fit(blocks, of_one, free_memory_bytes(), what=f"--cache-blocks {blocks}")
    return SchedulerLimits(
        blocks=blocks,
        block_size=BLOCK_SIZE,
        max_length=length,
        vocab_size=model.build.vocab.true,
        max_tokens_per_step=max(size.step_tokens, size.sequences),
        max_sequences=size.sequences,
        max_queued=max_queued,
    )
