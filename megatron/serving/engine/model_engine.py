"""The engine of a model in this process: its pool of blocks, and its limits."""

from dataclasses import dataclass, replace

import torch

from megatron import log
from megatron.device import current, free_memory_bytes
from megatron.errors import ConfigError
from megatron.inference.cache_size import StepSize, blocks_that_fit
from megatron.inference.constraint import grammar_table
from megatron.inference.draft_model import ModelDrafter, check_draft_model
from megatron.inference.drafts import Drafter, NgramDrafter
from megatron.inference.forward import ForwardExecutor, model_block_bytes
from megatron.inference.paged_cache import BLOCK_SIZE, blocks_for, check_blocks_fit
from megatron.inference.pooling import Pooling
from megatron.inference.start import ExecutorOptions, start_executor
from megatron.launch import Launch
from megatron.model.gpt_model import GPTModel
from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import Group, ParallelContext
from megatron.scheduling.limits import SchedulerLimits
from megatron.serving.engine.engine_thread import EngineAbilities, EngineThread, queue_limits
from megatron.serving.ranks.follower import Follower
from megatron.serving.ranks.rank_model import LoadWeights, RankModel
from megatron.serving.ranks.round_log import AheadLog, GroupLog, engine_group
from megatron.tokenizer.token_text import TextRules


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


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are proposed.

    Attributes:
        tokens: proposed for a sequence in a step, at most.
        draft_model: which proposes them, whole on the first rank of an engine and on no other;
            None: they are looked up in the sequence's own text.

    Raises:
        ConfigError: no tokens.
    """

    tokens: int
    draft_model: GPTModel | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(
                "no tokens are to be proposed",
                found=f"--speculative-tokens {self.tokens}",
                fix="use 1 or more, or leave --speculative out",
            )

    @property
    def block_bytes(self) -> int:
        """The bytes that each block takes on this rank beside those of the model."""
        draft = self.draft_model
        return 0 if draft is None else model_block_bytes(draft, draft.build.ctx)


def model_engine(
    model: GPTModel,
    ctx: ParallelContext,
    size: EngineSize,
    *,
    max_queued: int,
    load: LoadWeights | None = None,
    rules: TextRules | None = None,
    speculation: Speculation | None = None,
    pooling: Pooling = Pooling.MEAN,
) -> EngineThread | Follower:
    """Return an engine that is not started yet; on its ranks but the first, what follows it.

    All ranks that share the model call this together.

    Args:
        load: returns a model like this one with the weights of a folder, called by all ranks; None:
            weights cannot be exchanged.
        rules: of the model's tokenizer; None: requests cannot have grammars.

    Raises:
        ConfigError: the length is not given and not known, or longer than the model, or a draft
            model does not fit the model.
        MachineError: there is no room for one sequence, or for the blocks that were asked for.
    """
    limits = replace(
        _limits(model, ctx, size, speculation),
        max_queued=max_queued,
        steps_in_flight=_steps_in_flight(ctx),
    )
    drafter = _drafter(speculation, model, limits)
    options = ExecutorOptions(step=_step_size(limits), blocks=limits.blocks, draws_alone=True)
    started = start_executor(model.eval(), ctx, options)
    executor = started.executor
    of_rank = RankModel(model, executor.cache, load=load, on_new_weights=executor.take_new_weights)
    group = engine_group(ctx)
    ranks = GroupLog(group)
    if not ranks.leads:
        return Follower(executor, queue_limits(limits), receive=ranks.receive, model=of_rank)
    if not started.invariance.holds:
        ways = ", ".join(started.invariance.differences)
        log.warning(f"requests get other bits beside others than alone: {ways}")
    return EngineThread(
        executor,
        limits,
        abilities=EngineAbilities(
            drafter=drafter,
            grammars=None if rules is None else grammar_table(rules, model.build.vocab.true),
            pooling=pooling,
        ),
        is_batch_invariant=started.invariance.holds,
        ranks=ranks if limits.steps_in_flight == 1 else _ahead(group),
        model=of_rank,
    )


def ranks_of_replica(
    launch: Launch, *, tp: int, ep: int, pp: int = 1, etp: int | None = None
) -> int:
    """Return how many ranks hold the model once; a launch has to be whole replicas on one machine.

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
    replica = max(tp, ep * (tp if etp is None else etp)) * pp
    if ranks % replica:
        raise ConfigError(
            "the ranks of the server are no whole replicas of the model",
            found=f"{ranks} ranks, --tensor-model-parallel-size {tp}, "
            f"--pipeline-model-parallel-size {pp}, --expert-model-parallel-size {ep}",
            fix=f"start {replica} ranks for each replica",
        )
    return replica


def _ahead(group: Group) -> AheadLog:
    # Waits are counted of the thread that computes.
    return AheadLog(GroupLog(replace(group, activity=None)))


def _steps_in_flight(ctx: ParallelContext) -> int:
    """Return how many steps are computed at once: one on each stage.

    One where calls are compared, because the ranks make them in different orders then, and on GPUs,
    where messages and the log would share a queue in which they are matched by their order.
    """
    overlaps = ctx.whole_model.observer is None and current().type == "cpu"
    return ctx.pp.size if overlaps else 1


def _step_size(limits: SchedulerLimits) -> StepSize:
    draws = limits.max_sequences * (1 + limits.speculative_tokens)
    tokens = limits.max_tokens_per_step
    return StepSize(tokens, min(tokens, draws), limits.max_length)


def _drafter(
    speculation: Speculation | None, model: GPTModel, limits: SchedulerLimits
) -> Drafter | None:
    if speculation is None:
        return None
    if (draft := speculation.draft_model) is None:
        return NgramDrafter()
    check_draft_model(draft, model, limits.max_length)
    return ModelDrafter(ForwardExecutor(draft.eval(), draft.build.ctx, blocks=limits.blocks))


def _limits(
    model: GPTModel, ctx: ParallelContext, size: EngineSize, speculation: Speculation | None
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
    wanted = size.sequences * blocks_for(length, BLOCK_SIZE)
    limits = SchedulerLimits(
        blocks=wanted if size.blocks is None else size.blocks,
        block_size=BLOCK_SIZE,
        max_length=length,
        vocab_size=model.build.vocab.true,
        max_tokens_per_step=step_tokens,
        max_sequences=size.sequences,
        speculative_tokens=0 if speculation is None else speculation.tokens,
        prompt_is_prefix=model.prompt_is_prefix,
    )
    beside = 0 if speculation is None else speculation.block_bytes
    if size.blocks is not None:
        of_one = model_block_bytes(model, ctx) + beside
        what = f"--cache-blocks {size.blocks}"
        check_blocks_fit(size.blocks, of_one, free_memory_bytes(), what=what)
        return limits
    fitting = blocks_that_fit(model, ctx, _step_size(limits), draft_block_bytes=beside)
    here = torch.tensor(wanted if fitting is None else min(wanted, fitting))
    # Equal on all replicas: a request that one can serve, any other can.
    return replace(limits, blocks=int(all_reduce(here.to(current()), ctx.world, op="min")))
