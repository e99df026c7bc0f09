"""A job from its submission to its end: events of the engine in, parts of answers out.

Whatever happens to the caller, every request of a job is ended: by its own end, or by an abort. A
job waits for a bounded time only: its deadline is the engine's to keep, and ends it here a moment
later if the engine does not; an engine that no longer lives ends it at once.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from megatron.serving.admission import Admission, stopping
from megatron.serving.api_errors import ApiError, ErrorCode, refused_by
from megatron.serving.conversion import TextJob
from megatron.serving.engine_client import (
    EngineClient,
    EngineEvent,
    EngineQueueFullError,
    EngineUnavailableError,
    FinishedBy,
    PromptComputed,
    RequestEnded,
    RequestRefusedError,
    TokenDrawn,
    TokenScore,
)
from megatron.serving.limits import ServerLimits
from megatron.serving.metrics import JobTimes, ServerMetrics
from megatron.serving.sample_text import SamplePart, SampleText, ShownToken, prompt_tokens
from megatron.serving.served_model import ServedModel

_LOOK_S = 1.0  # how often a silent engine is looked at
_GRACE_NS = 2_000_000_000  # after a deadline that the engine has not kept
_RETRY_S = 5


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """More of one answer.

    Attributes:
        index: of the answer: the number of its prompt, times the samples, plus that of its sample.
        finish: why the answer ended; None while more follows.
    """

    index: int
    part: SamplePart
    finish: FinishedBy | None = None


class Usage(NamedTuple):
    """Tokens of a job.

    Attributes:
        prompt: of all prompts.
        completion: drawn for all answers.
        cached: of the prompts, found in the prefix cache.
    """

    prompt: int
    completion: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class ServerBackend:
    """What generation needs of the server."""

    model: ServedModel
    engine: EngineClient
    limits: ServerLimits
    admission: Admission
    metrics: ServerMetrics


class JobRun:
    """One job in progress.

    Attributes:
        embeddings: of its prompts, by number, where they were asked for and are computed.
    """

    def __init__(self, job: TextJob, backend: ServerBackend) -> None:
        self.job, self._backend = job, backend
        self._events: asyncio.Queue[tuple[int, EngineEvent | None]] = asyncio.Queue()
        self._samples = [
            SampleText(
                backend.model.rules,
                prompt.tokens,
                stops=job.stops,
                min_tokens=request.min_new_tokens,
            )
            for prompt, request in zip(job.prompts, job.requests)
            for _ in range(job.samples)
        ]
        self._prompt_scores: dict[int, tuple[TokenScore, ...]] = {}
        self._begun: set[int] = set()
        self.embeddings: dict[int, tuple[float, ...]] = {}
        self._cached_tokens = 0
        self._times = JobTimes()

    @property
    def usage(self) -> Usage:
        """The tokens of the job so far."""
        drawn = sum(sample.count for sample in self._samples)
        return Usage(self.job.prompt_tokens, drawn, self._cached_tokens)

    async def parts(self) -> AsyncGenerator[AnswerPart | None, None]:
        """Submit the job and yield its answers in parts.

        None comes first, when the engine has accepted the job, and after some time without a part.
        The last part of every answer has a `finish`. Close the iterator to end the job early.

        Raises:
            ApiError: the job was not accepted, or did not complete.
        """
        job, backend = self.job, self._backend
        try:
            with backend.admission.job(job.id, len(job.requests), self._end):
                try:
                    self._submit()
                    backend.metrics.accepted(job)
                    yield None
                    async for part in self._answer():
                        yield part
                finally:
                    for request in job.requests:
                        backend.engine.abort(request.id)
        except ApiError as error:
            backend.metrics.failed(error)
            raise

    def _submit(self) -> None:
        for number, request in enumerate(self.job.requests):
            try:
                self._backend.engine.submit(request, partial(self._deliver, number))
            except RequestRefusedError as error:
                raise refused_by(error) from error
            except EngineQueueFullError as error:
                raise ApiError(
                    ErrorCode.QUEUE_FULL,
                    error.problem,
                    found=error.found,
                    fix=error.fix,
                    retry_after_s=_RETRY_S,
                ) from error
            except EngineUnavailableError as error:
                raise _unavailable(error.problem, error.found) from error

    def _deliver(self, number: int, event: EngineEvent) -> None:
        self._events.put_nowait((number, event))

    def _end(self) -> None:
        self._events.put_nowait((-1, None))

    async def _answer(self) -> AsyncIterator[AnswerPart | None]:
        unfinished, last_part = set(range(len(self._samples))), time.monotonic()
        while unfinished:
            changed = await self._changed_samples()
            now = time.monotonic()
            for index in sorted(changed & unfinished):
                part = self._part(index)
                if part.finish is not None:
                    unfinished.discard(index)
                elif not (part.part.text or part.part.tokens):
                    continue
                last_part = now
                yield part
            if not changed and now - last_part >= self._backend.limits.keep_alive_interval:
                last_part = now
                yield None
        finishes = [sample.finish or "length" for sample in self._samples]
        self._backend.metrics.completed(self.job, self.usage.completion, finishes, self._times)

    async def _changed_samples(self) -> set[int]:
        """Wait for events, but not for long, and return the answers that they belong to."""
        try:
            async with asyncio.timeout(_LOOK_S):
                first = await self._events.get()
        except TimeoutError:
            self._check_engine()
            return set()
        events = [first]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return {index for number, event in events if (index := self._take(number, event)) >= 0}

    def _take(self, number: int, event: EngineEvent | None) -> int:
        """Take an event of one prompt; return the answer that it changes, or -1."""
        if event is None:
            raise stopping()
        match event:
            case PromptComputed():
                self._cached_tokens += event.cached_tokens
                if event.embedding is not None:
                    self.embeddings[number] = event.embedding
                if event.scores is not None:
                    self._prompt_scores[number] = event.scores
                return -1
            case TokenDrawn():
                index = number * self.job.samples + event.sample
                sample = self._samples[index]
                if sample.finish is not None:  # drawn before the engine knew of a stop string
                    return -1
                sample.add(event)
                self._times.add_token()
                if sample.finish is not None and event.finish is None:
                    self._backend.engine.end_sample(self.job.requests[number].id, event.sample)
                return index
            case RequestEnded():
                first = number * self.job.samples
                samples = self._samples[first : first + self.job.samples]
                if event.state == "completed" and self.job.requests[number].max_new_tokens == 0:
                    samples[0].finish = "length"
                    return first
                if not all(sample.finish for sample in samples):
                    raise self._early_end(event)
                return -1

    def _part(self, index: int) -> AnswerPart:
        """Return what is new of an answer; its first part has the prompt, if that is echoed."""
        sample, number = self._samples[index], index // self.job.samples
        part = sample.take()
        if self.job.echo and index not in self._begun:
            self._begun.add(index)
            part = self._with_prompt(number, part)
        elif self.job.echo:
            part = SamplePart(part.text, self._moved(number, part.tokens))
        return AnswerPart(index, part, sample.finish)

    def _with_prompt(self, number: int, part: SamplePart) -> SamplePart:
        prompt, scores = self.job.prompts[number], self._prompt_scores.get(number)
        tokens: tuple[ShownToken, ...] = ()
        if scores is not None:
            tokens = prompt_tokens(self._backend.model.rules, prompt.tokens, scores)
        return SamplePart(prompt.text + part.text, (*tokens, *self._moved(number, part.tokens)))

    def _moved(self, number: int, tokens: tuple[ShownToken, ...]) -> tuple[ShownToken, ...]:
        """Return tokens with their places behind the prompt."""
        length = len(self.job.prompts[number].text)
        return tuple(replace(token, offset=token.offset + length) for token in tokens)

    def _check_engine(self) -> None:
        status = self._backend.engine.status()
        if not status.is_alive:
            raise _unavailable("the engine no longer works", status.detail or status.state)
        deadline_ns = self.job.requests[0].deadline_ns
        if deadline_ns is not None and time.monotonic_ns() > deadline_ns + _GRACE_NS:
            raise self._expired("the engine has not answered")

    def _early_end(self, end: RequestEnded) -> ApiError:
        if end.state == "expired":
            return self._expired(end.detail or "not all tokens were drawn")
        if end.state == "aborted" or not self._backend.engine.status().is_alive:
            return _unavailable("the request was ended early", end.detail or end.state)
        return ApiError(
            ErrorCode.INTERNAL,
            "the request could not be computed",
            found=end.detail or end.state,
            fix="tell whoever runs the server; its log has more",
        )

    def _expired(self, found: str) -> ApiError:
        return ApiError(
            ErrorCode.DEADLINE,
            f"the request took longer than {self._backend.limits.request_timeout} seconds",
            found=found,
            fix="ask for fewer tokens, or send it when the server has less to do",
        )


def _unavailable(problem: str, found: object) -> ApiError:
    return ApiError(
        ErrorCode.ENGINE_UNAVAILABLE,
        problem,
        found=found,
        fix="send the same request again later; /health says when the engine works",
        retry_after_s=_RETRY_S,
    )
