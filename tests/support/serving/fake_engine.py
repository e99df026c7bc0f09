"""An engine without a model: it draws the tokens of a given text, one a moment.

What it draws depends on nothing but the request, so tests know every answer. It can be slow, full,
dead, or fail in the middle.
"""

import asyncio
from collections.abc import Callable, Sequence

from megatron.errors import MegatronError
from megatron.serving.engine_client import (
    EndState,
    EngineEvent,
    EngineQueueFullError,
    EngineRequest,
    EngineStatus,
    EngineUnavailableError,
    FinishedBy,
    PromptComputed,
    RequestEnded,
    RequestRefusedError,
    TokenDrawn,
    TokenScore,
)

LOGPROB = -0.5


class FakeEngine:
    """Answers every request with a text, in bytes or the given tokens, and a stop token behind it.

    Attributes:
        score: gives each token its score, with so many others.
        delay_s: time for each token.
        error: raised by `submit`.
        ends_after: the tokens after which a request ends early, and how.
        is_silent: whether nothing comes at all.
        waits_after: the tokens after which a request waits until `goes_on` is set.
        requests: all that were submitted.
        aborted: ids of those that were aborted before their end.
    """

    def __init__(
        self, text: str = "Hello, world.", *, delay_s: float = 0.0, tokens: Sequence[int] = ()
    ) -> None:
        self.tokens, self.delay_s = tokens or tuple(text.encode()), delay_s
        self.score: Callable[[int, int], TokenScore] = score
        self.error: MegatronError | None = None
        self.ends_after: tuple[int, EndState] | None = None
        self.is_silent = False
        self.waits_after: int | None = None
        self.goes_on = asyncio.Event()
        self.state = EngineStatus(state="running", blocks=8)
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.ended_samples: list[tuple[str, int]] = []
        self.generated = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._tasks)

    def submit(self, request: EngineRequest, deliver: Callable[[EngineEvent], None]) -> None:
        if self.error is not None:
            raise self.error
        self.requests.append(request)
        self._tasks[request.id] = asyncio.ensure_future(self._run(request, deliver))

    def abort(self, request: str) -> None:
        if (task := self._tasks.pop(request, None)) is not None:
            self.aborted.append(request)
            task.cancel()

    def end_sample(self, request: str, sample: int) -> None:
        self.ended_samples.append((request, sample))

    def status(self) -> EngineStatus:
        return EngineStatus(
            state=self.state.state,
            is_alive=self.state.is_alive,
            detail=self.state.detail,
            blocks=self.state.blocks,
            running=self.running,
            used_blocks=self.running,
            generated_tokens=self.generated,
        )

    async def _run(self, request: EngineRequest, deliver: Callable[[EngineEvent], None]) -> None:
        if (count := request.prompt_logprobs) is None:
            embedding = (float(len(request.prompt)), 0.5) if request.embeds else None
            deliver(PromptComputed(embedding=embedding))
        else:
            deliver(PromptComputed(tuple(self.score(token, count) for token in request.prompt[1:])))
        stop = min(request.stop_tokens, default=None)
        tokens = list(self.tokens)
        if stop is not None:
            tokens.append(stop)
        tokens = (tokens * request.max_new_tokens)[: request.max_new_tokens]
        for number, token in enumerate(tokens):
            await asyncio.sleep(self.delay_s)
            if number == self.waits_after:
                await self.goes_on.wait()
            if self.is_silent:
                await asyncio.Event().wait()
            if self.ends_after is not None and number >= self.ends_after[0]:
                deliver(RequestEnded(self.ends_after[1], "as a test wants"))
                self._tasks.pop(request.id, None)
                return
            is_stop = token == stop
            for sample in range(request.samples):
                scores = None if request.logprobs is None else self.score(token, request.logprobs)
                is_last = number == len(tokens) - 1
                finish: FinishedBy | None = "length" if is_last else None
                deliver(TokenDrawn(sample, token, scores, "stop" if is_stop else finish))
                self.generated += 1
            if is_stop:
                break
        self._tasks.pop(request.id, None)
        deliver(RequestEnded("completed"))


def score(token: int, count: int) -> TokenScore:
    """The score of any token, and of `count` others."""
    return TokenScore(LOGPROB, tuple((other, -1.0 - other) for other in range(65, 65 + count)))


FULL = EngineQueueFullError("the queue is full", found="8 requests", fix="try later")
PAUSED = EngineUnavailableError("the engine is paused", found="paused", fix="resume it")
REFUSED = RequestRefusedError("it can never fit", found="9 blocks", fix="ask for 3 tokens")
