"""A scheduler and a model together, step by step in this thread, without a server."""

from collections.abc import Sequence
from dataclasses import dataclass, field

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

MOST_STEPS = 5000  # a run that needs more does not end
GREEDY = SamplingParams(greedy=True)


@dataclass
class EngineRun:
    """What became of requests that were submitted together.

    Attributes:
        tokens: drawn tokens of each sample, by request.
        targets: log-probabilities of the tokens of each prompt, where they were asked for.
        states: pooled states of prompts, where they were asked for.
        preemptions: how often a request lost its blocks.
    """

    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    targets: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    ends: dict[str, RequestEnd] = field(default_factory=dict)
    states: dict[str, PooledStates] = field(default_factory=dict)
    preemptions: int = 0


def run_engine(
    model: GPTModel,
    requests: Sequence[Request],
    limits: SchedulerLimits,
    *,
    params: SamplingParams = GREEDY,
    pooling: Pooling = Pooling.MEAN,
) -> EngineRun:
    """Serve all requests to their ends."""
    executor = ForwardExecutor(
        model, ParallelContext.single(), blocks=limits.blocks, block_size=limits.block_size
    )
    scheduler, run = Scheduler(limits), EngineRun()
    owners: dict[int, tuple[Request, int]] = {}
    for request in requests:
        for sample, sequence in enumerate(scheduler.submit(request)):
            owners[sequence] = (request, sample)
        run.tokens[request.id] = [[] for _ in range(request.samples)]
        run.targets[request.id] = []
    for step in range(MOST_STEPS):
        plan = scheduler.plan(step)
        if not plan.slices:
            return run
        draws = {}
        for part in plan.slices:
            request, sample = owners[part.sequence]
            output = run.tokens[request.id][sample]
            draws[part.sequence] = SequenceDraw(
                params=params, seed=5, choice=sample, prompt=request.prompt, output=output
            )
        results = executor.run(plan, draws)
        scheduler.complete({each.sequence: each.tokens for each in results if each.tokens})
        for part, result in zip(plan.slices, results, strict=True):
            request, sample = owners[part.sequence]
            if result.targets:
                run.targets[request.id][part.start :] = result.targets
            if result.hidden is not None:
                states = run.states.setdefault(request.id, PooledStates(pooling))
                states.add(part.start, result.hidden)
            run.tokens[request.id][sample] += result.tokens
        run.ends |= {end.request: end for end in scheduler.take_ended()}
        run.preemptions += len(scheduler.take_preemptions())
    raise AssertionError(f"{MOST_STEPS} steps without an end")
