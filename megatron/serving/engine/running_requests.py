"""The requests of an engine that have not ended: their tokens, constraints and events.

What a step found becomes events here. Everything runs in the thread of the engine; events return to
the event loop of whoever asked.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from torch import Tensor

from megatron import log
from megatron.errors import NumericsError, first_line
from megatron.inference.constraint import GrammarConstraint
from megatron.inference.forward import FIX_OF_SCORES, SliceResult
from megatron.inference.logprobs import TokenLogprobs
from megatron.inference.pooling import PooledStates, Pooling
from megatron.inference.sampling import SequenceDraw
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice
from megatron.serving.engine.checked_request import CheckedRequest
from megatron.serving.engine_client import (
    EndState,
    EngineEvent,
    EngineRequest,
    FinishedBy,
    PromptComputed,
    RequestEnded,
    TokenDrawn,
    TokenScore,
)

Deliver: TypeAlias = Callable[[EngineEvent], None]


class StepCounts(NamedTuple):
    """What a step adds to the numbers of an engine; see `EngineStatus`."""

    generated_tokens: int
    prefix_queries: int
    prefix_hits: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int


@dataclass(slots=True)
class SubmittedRequest:
    """A request that has not ended, and where its events go."""

    checked: CheckedRequest
    deliver: Deliver
    loop: asyncio.AbstractEventLoop
    sequences: tuple[int, ...] = ()
    scores: list[TokenScore] = field(default_factory=list)  # of the prompt's tokens but the first
    is_prompt_computed: bool = False
    states: PooledStates | None = None
    embedding: tuple[float, ...] | None = None
    cached: int | None = None  # tokens of the prompt that were found in the prefix cache
    events: list[EngineEvent] = field(default_factory=list)

    @property
    def request(self) -> EngineRequest:
        """What the client asks for."""
        return self.checked.request

    def send(self) -> None:
        """Send the events that are there."""
        events, self.events = self.events, []
        if not events:
            return
        try:
            self.loop.call_soon_threadsafe(_deliver_all, self.deliver, events)
        except RuntimeError:  # its event loop is closed: nobody is there to read
            log.debug(f"events of request {self.request.id} have no reader any more")


@dataclass(slots=True)
class _Sample:
    """One sample of a request."""

    request: SubmittedRequest
    number: int
    constraint: GrammarConstraint | None = None
    output: list[int] = field(default_factory=list)


class RunningRequests:
    """The requests of one engine.

    Args:
        pooling: what becomes of hidden states that are asked for.
    """

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._requests: dict[str, SubmittedRequest] = {}
        self._samples: dict[int, _Sample] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def names(self) -> list[str]:
        """The ids of all requests."""
        return list(self._requests)

    def get(self, name: str) -> SubmittedRequest | None:
        """Return a request; None if it has ended."""
        return self._requests.get(name)

    def add(self, submitted: SubmittedRequest, sequences: Sequence[int]) -> None:
        """Take a request with the sequences that a scheduler gave to its samples."""
        submitted.sequences = tuple(sequences)
        self._requests[submitted.request.id] = submitted
        for number, sequence in enumerate(sequences):
            constraint = submitted.checked.constraint
            copied = None if constraint is None else constraint.copy()
            self._samples[sequence] = _Sample(submitted, number, copied)

    def end(self, name: str, state: EndState, detail: str) -> EngineRequest:
        """End a request, tell its client, and return it."""
        submitted = self._requests.pop(name)
        for sequence in submitted.sequences:
            self._samples.pop(sequence, None)
        submitted.events.append(RequestEnded(state, detail))
        submitted.send()
        return submitted.request

    def send(self) -> None:
        """Send the events of all requests."""
        for submitted in self._requests.values():
            submitted.send()

    def draws(self, plan: ForwardPlan) -> dict[int, SequenceDraw]:
        """Return how the next tokens of a plan's slices are drawn, by sequence."""
        return {each.sequence: self._draw(each.sequence) for each in plan.slices if each.samples}

    def failures(self, plan: ForwardPlan, results: Sequence[SliceResult]) -> dict[int, str]:
        """Take the hidden states of a step; return what is wrong with its sequences, if anything.

        Their scores or embeddings are not finite, or tokens do not match their grammar.
        """
        failed = {each.sequence: self._not_finite(each) for each in results if not each.is_finite}
        for part, result in zip(plan.slices, results, strict=True):
            if result.hidden is None:
                continue
            try:
                self._pool(self._samples[part.sequence].request, part, result.hidden)
            except NumericsError as error:
                failed[part.sequence] = first_line(error)
        for result in results:
            if (problem := self._grammar_problem(result)) is not None:
                failed[result.sequence] = problem
        return failed

    def add_step(
        self, plan: ForwardPlan, results: Sequence[SliceResult], failed: Mapping[int, str]
    ) -> StepCounts:
        """Make events of what a step found for the sequences that have not failed."""
        generated, looked_up = 0, list[tuple[int, int]]()
        for part, result in zip(plan.slices, results, strict=True):
            if result.sequence not in failed:
                looked_up.append(self._add_prompt_part(part, result))
                generated += self._add_tokens(result)
        queries, hits = map(sum, zip((0, 0), *looked_up))
        return StepCounts(
            generated_tokens=generated,
            prefix_queries=queries,
            prefix_hits=hits,
            drafts=sum(each.drafts > 0 for each in results),
            draft_tokens=sum(each.drafts for each in results),
            accepted_tokens=sum(len(each.tokens) - 1 for each in results if each.drafts),
        )

    def _draw(self, sequence: int) -> SequenceDraw:
        sample = self._samples[sequence]
        return sample.request.checked.draw(sample.number, sample.output, sample.constraint)

    def _pool(self, submitted: SubmittedRequest, part: SequenceSlice, hidden: Tensor) -> None:
        if submitted.states is None:
            submitted.states = PooledStates(self._pooling)
        submitted.states.add(part.start, hidden)
        if part.end == len(submitted.request.prompt):
            submitted.embedding = submitted.states.embedding()

    def _grammar_problem(self, result: SliceResult) -> str | None:
        """Return why the tokens of a slice do not match the grammar of their request."""
        sample = self._samples[result.sequence]
        if sample.constraint is None or not result.tokens:
            return None
        ends = sample.request.request.stop_tokens
        drawn = takewhile(lambda token: token not in ends, result.tokens)
        return sample.constraint.problem([*sample.output, *drawn])

    def _not_finite(self, result: SliceResult) -> str:
        sample = self._samples[result.sequence]
        detail = (
            f"its scores are not finite after {len(sample.output)} new tokens of sample "
            f"{sample.number}; {FIX_OF_SCORES}"
        )
        log.error(f"request {sample.request.request.id} failed: {detail}")
        return detail

    def _add_prompt_part(self, part: SequenceSlice, result: SliceResult) -> tuple[int, int]:
        """Take what a step found of a prompt; what is computed again has the same bits.

        Returns:
            Tokens that were looked for and found in the prefix cache.
        """
        submitted = self._samples[part.sequence].request
        looked_up = (0, 0)
        if submitted.is_prompt_computed:
            return looked_up
        if submitted.cached is None:  # not again after a preemption
            submitted.cached = part.start
            if submitted.checked.scheduled.reuses_prefix:
                looked_up = (len(submitted.request.prompt), part.start)
        if result.targets:
            submitted.scores[part.start :] = [_score(each) for each in result.targets]
        if part.end >= len(submitted.request.prompt):
            submitted.is_prompt_computed = True
            is_scored = submitted.request.prompt_logprobs is not None
            scores = tuple(submitted.scores) if is_scored else None
            submitted.events.append(PromptComputed(scores, submitted.cached, submitted.embedding))
        return looked_up

    def _add_tokens(self, result: SliceResult) -> int:
        """Tell of the tokens of a slice up to one that ends its sample; return how many."""
        for place, token in enumerate(result.tokens):
            logprobs = result.logprobs[place] if result.logprobs else None
            if self._add_token(self._samples[result.sequence], token, logprobs):
                return place + 1
        return len(result.tokens)

    def _add_token(self, sample: _Sample, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Tell of a token; return whether it ends its sample."""
        request = sample.request.request
        sample.output.append(token)
        count = len(sample.output)
        finish: FinishedBy | None = None
        if token in request.stop_tokens and count >= request.min_new_tokens:
            finish = "stop"
        elif count == request.max_new_tokens:
            finish = "length"
        score = None if logprobs is None else _score(logprobs)
        sample.request.events.append(TokenDrawn(sample.number, token, score, finish))
        return finish is not None


def _score(logprobs: TokenLogprobs) -> TokenScore:
    return TokenScore(logprobs.chosen, logprobs.top)


def _deliver_all(deliver: Deliver, events: Sequence[EngineEvent]) -> None:
    for event in events:
        deliver(event)
