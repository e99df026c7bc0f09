"""What steps find becomes events of requests, and numbers of the engine."""

import asyncio

from megatron.inference.forward import SliceResult
from megatron.inference.pooling import Pooling
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice
from megatron.serving.engine.checked_request import checked_request
from megatron.serving.engine.running_requests import (
    RunningRequests,
    StepCounts,
    SubmittedRequest,
)
from megatron.serving.engine_client import EngineEvent, PromptComputed, RequestEnded, TokenDrawn
from tests.support.serving.calls import run
from tests.unit.serving.engine.test_engine_thread import LIMITS, request


def test_tokens_count_up_to_the_one_that_ends_their_sample() -> None:
    seen: list[EngineEvent] = []

    async def use() -> StepCounts:
        requests = RunningRequests(Pooling.MEAN)
        checked = checked_request(request("a", max_new_tokens=2), LIMITS, None, arrival_ns=0)
        submitted = SubmittedRequest(checked, seen.append, asyncio.get_running_loop())
        requests.add(submitted, (3,))
        prompt = checked.request.prompt
        part = SequenceSlice(3, prompt, 0, (0,), samples=True)
        result = SliceResult(3, (5, 6, 7), drafts=2)
        counts = requests.add_step(ForwardPlan((), (part,)), [result], {})
        requests.send()
        requests.end("a", "completed", "")
        assert (len(requests), requests.get("a"), requests.names) == (0, None, [])
        await asyncio.sleep(0)
        return counts

    counts = run(use())
    assert counts.generated_tokens == 2
    assert (counts.drafts, counts.draft_tokens, counts.accepted_tokens) == (1, 2, 2)
    assert seen == [
        PromptComputed(),
        TokenDrawn(0, 5),
        TokenDrawn(0, 6, finish="length"),
        RequestEnded("completed"),
    ]
