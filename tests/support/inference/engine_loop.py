"""A scheduler and a model together, step by step in this thread, without a server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron.inference.drafts import Drafter
from megatron.inference.forward import ForwardExecutor
from megatron.inference.logprobs import TokenLogprobs
from megatron.inference.pooling import PooledStates, Pooling
from megatron.inference.sampling import SequenceDraw
from megatron.inference.sampling_params import SamplingParams
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.requests import Request, RequestEnd
from megatron.scheduling.scheduler import Scheduler
from tests.support.inference.paged_engine import check_blocks

MOST_STEPS = 5000  # a run that needs more does not end
GREEDY = SamplingParams(greedy=True)
DrawOf = Callable[[Request, int, Sequence[int]], SequenceDraw]
"""The draw of a sample of a request after its output so far."""


@dataclass
class EngineRun:
    """What became of requests that were submitted together.

    Attributes:
        tokens: drawn tokens of each sample, by request.
        targets: log-probabilities of the tokens of each prompt, where they were asked for.
        states: pooled states of prompts, where they were asked for.
        preemptions: how often a request lost its blocks.
        copies: of blocks that several sequences had.
        shared: prefills that found keys and values of others.
        drafted, accepted: proposed tokens, and those of them that were drawn.
    """

    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    targets: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    ends: dict[str, RequestEnd] = field(default_factory=dict)
    states: dict[str, PooledStates] = field(default_factory=dict)
    preemptions: int = 0
    copies: int = 0
    shared: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0


def executor_of(model: GPTModel, limits: SchedulerLimits) -> ForwardExecutor:
    """Return an executor on one rank with the blocks of a scheduler."""
    return ForwardExecutor(
        model, ParallelContext.single(), blocks=limits.blocks, block_size=limits.block_size
    )


def greedy_draw(request: Request, sample: int, output: Sequence[int]) -> SequenceDraw:
    """Return the draw of the likeliest token."""
    return SequenceDraw(params=GREEDY, seed=5, choice=sample, prompt=request.prompt, output=output)


def run_engine(
    executor: ForwardExecutor,
    requests: Sequence[Request],
    limits: SchedulerLimits,
    *,
    draw_of: DrawOf = greedy_draw,
    drafter: Drafter | None = None,
    pooling: Pooling = Pooling.MEAN,
) -> EngineRun:
    """Serve all requests to their ends."""
    scheduler, run = Scheduler(limits), EngineRun()
    owners: dict[int, tuple[Request, int]] = {}
    for request in requests:
        for sample, sequence in enumerate(scheduler.submit(request)):
            owners[sequence] = (request, sample)
        run.tokens[request.id] = [[] for _ in range(request.samples)]
        run.targets[request.id] = []
    while run.steps < MOST_STEPS:
        plan = scheduler.plan(run.steps)
        if not plan.slices:
            return run
        run.steps += 1
        run.copies += len(plan.copies)
        run.shared += sum(part.start > 0 and len(part.tokens) > 1 for part in plan.slices)
        draws = {}
        for part in plan.slices:
            if part.samples:
                request, sample = owners[part.sequence]
                output = run.tokens[request.id][sample]
                draws[part.sequence] = draw_of(request, sample, output)
        if drafter is not None:
            plan = scheduler.propose(drafter.propose(plan, draws))
        results = executor.run(plan, draws)
        scheduler.complete({each.sequence: each.tokens for each in results if each.tokens})
        check_blocks(scheduler)
        for part, result in zip(plan.slices, results, strict=True):
            request, sample = owners[part.sequence]
            if result.targets:
                run.targets[request.id][part.start :] = result.targets
            if result.hidden is not None:
                states = run.states.setdefault(request.id, PooledStates(pooling))
                states.add(part.start, result.hidden)
            run.tokens[request.id][sample] += result.tokens
            run.drafted += result.drafts
            run.accepted += max(0, len(result.tokens) - 1)
        run.ends |= {end.request: end for end in scheduler.take_ended()}
        run.preemptions += len(scheduler.take_preemptions())
    raise AssertionError(f"{MOST_STEPS} steps without an end")
