"""Requests that a scheduler plans and an executor computes, without threads and servers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.inference.drafts import Drafter
from megatron.inference.forward import ForwardExecutor
from megatron.inference.sampling import SequenceDraw
from megatron.scheduling.forward_plan import ForwardPlan, with_drafts
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.requests import Request, RequestEnd
from megatron.scheduling.scheduler import Scheduler
from tests.support.inference.paged_engine import check_blocks

MOST_STEPS = 300
DrawOf = Callable[[Request, int, Sequence[int]], SequenceDraw]
"""The draw of a sample of a request after a text with its prompt."""


@dataclass
class ScheduledRun:
    """What became of requests.

    Attributes:
        texts: of each sample of each request, with the prompt.
        shared: prefills that found keys and values of others.
    """

    texts: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: list[RequestEnd] = field(default_factory=list)
    preemptions: int = 0
    copies: int = 0
    shared: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0


class NoDrafts:
    """A `Drafter` that proposes nothing."""

    def propose(
        self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]
    ) -> Mapping[int, Sequence[int]]:
        return {}


def run_scheduled(
    executor: ForwardExecutor,
    limits: SchedulerLimits,
    requests: Sequence[Request],
    draw_of: DrawOf,
    drafter: Drafter | None = None,
) -> ScheduledRun:
    """Serve requests to their ends."""
    run, scheduler, drafter = ScheduledRun(), Scheduler(limits), drafter or NoDrafts()
    owners: dict[int, tuple[Request, int]] = {}
    for request in requests:
        for choice, sequence in enumerate(scheduler.submit(request)):
            owners[sequence] = (request, choice)
            run.texts[request.id, choice] = list(request.prompt)
    for step in range(MOST_STEPS):
        plan = scheduler.plan(step)
        if not plan.slices:
            break
        run.steps += 1
        run.copies += len(plan.copies)
        run.shared += sum(part.start > 0 and len(part.tokens) > 1 for part in plan.slices)
        draws = {}
        for part in plan.slices:
            if part.samples:
                request, choice = owners[part.sequence]
                draws[part.sequence] = draw_of(request, choice, run.texts[request.id, choice])
        plan = with_drafts(plan, drafter.propose(plan, draws))
        results = executor.run(plan, draws)
        for each in results:
            request, choice = owners[each.sequence]
            run.texts[request.id, choice] += each.tokens
            run.drafted += each.drafts
            run.accepted += max(0, len(each.tokens) - 1)
        scheduler.complete({each.sequence: each.tokens for each in results if each.tokens})
        check_blocks(scheduler)
        run.preemptions += len(scheduler.take_preemptions())
    run.ends = scheduler.take_ended()
    return run
