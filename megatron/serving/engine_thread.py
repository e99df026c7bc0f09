"""An engine in a thread of its own: it alone touches the scheduler and the model.

Commands reach the thread through a queue and events return to the event loop of whoever asked. The
scheduler gets time as integers of the monotonic clock. A step that fails ends the requests in it;
several in a row end the engine, with every request. Nobody waits for an engine that is gone.
"""

import asyncio
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Protocol, TypeAlias

from torch import Tensor

from megatron import log
from megatron.errors import ConfigError, MegatronError, NumericsError, first_line
from megatron.inference.constraint import GrammarConstraint, GrammarTable
from megatron.inference.drafts import Drafter
from megatron.inference.forward import FIX_OF_SCORES, SliceResult
from megatron.inference.logprobs import TokenLogprobs
from megatron.inference.pooling import PooledStates, Pooling
from megatron.inference.sampling import SequenceDraw
from megatron.inference.sampling_params import SamplingParams
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice, with_drafts
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.requests import Request, RequestError
from megatron.scheduling.scheduler import Scheduler
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
    SamplingOptions,
    TokenDrawn,
    TokenScore,
)

STEP_TIMEOUT_S = 60.0  # after which a step counts as one that does not end
_MOST_FAILURES = 3  # failed steps in a row
_IDLE_S = 0.5  # how often an idle engine says that it lives
_NS = 1_000_000_000

Deliver: TypeAlias = Callable[[EngineEvent], None]
Command: TypeAlias = Callable[[], None]


class StepExecutor(Protocol):
    """What computes a step, such as `inference.forward.ForwardExecutor`."""

    def run(
        self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]
    ) -> Sequence[SliceResult]: ...


@dataclass(slots=True)
class _Sample:
    """One sample of a request in the thread."""

    request: "_Submitted"
    number: int
    constraint: GrammarConstraint | None = None
    output: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Submitted:
    """A request that has not ended, and where its events go."""

    request: EngineRequest
    scheduled: Request
    params: SamplingParams
    constraint: GrammarConstraint | None
    deliver: Deliver
    loop: asyncio.AbstractEventLoop
    sequences: tuple[int, ...] = ()
    scores: list[TokenScore] = field(default_factory=list)  # of the prompt's tokens but the first
    is_prompt_computed: bool = False
    states: PooledStates | None = None
    embedding: tuple[float, ...] | None = None
    cached: int | None = None  # tokens of the prompt that were found in the prefix cache
    events: list[EngineEvent] = field(default_factory=list)


class EngineThread:
    """An `EngineClient` of a scheduler and a model in this process.

    Args:
        grammars: makes constraints of grammars; None: requests have none.
        drafter: proposes tokens, for which the limits have room; one that fails is not used again.
        is_batch_invariant: what a probe of the executor found; shown in the state.
        pooling: what becomes of hidden states that are asked for.
        clock_ns: the monotonic clock.
    """

    def __init__(
        self,
        executor: StepExecutor,
        limits: SchedulerLimits,
        *,
        drafter: Drafter | None = None,
        grammars: GrammarTable | None = None,
        step_timeout_s: float = STEP_TIMEOUT_S,
        is_batch_invariant: bool | None = None,
        pooling: Pooling = Pooling.MEAN,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        # Requests are counted here, where callers get an answer at once: those that run, too.
        self._most = limits.max_queued + limits.max_sequences
        self._executor = executor
        self._scheduler = Scheduler(replace(limits, max_queued=self._most))
        self._clock_ns, self._pooling, self._drafter = clock_ns, pooling, drafter
        self._grammars = grammars
        self._step_timeout_ns = int(step_timeout_s * _NS)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._submitted: dict[str, _Submitted] = {}
        self._samples: dict[int, _Sample] = {}
        self._failures, self._is_stopping = 0, False
        self._status = EngineStatus(
            state="loading",
            takes_requests=False,
            blocks=limits.blocks,
            is_batch_invariant=is_batch_invariant,
        )
        self._last_sign_ns = clock_ns()
        self._unfinished = 0  # of the callers' view; guarded by the lock
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def max_length(self) -> int:
        """Most tokens of a sequence."""
        return self._scheduler.limits.max_length

    def start(self) -> None:
        """Begin to compute."""
        self._set_state("running", takes_requests=True)
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End all requests and the thread; return whether it has ended in time."""
        self._commands.put(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, request: EngineRequest, deliver: Deliver) -> None:
        try:
            scheduled = self._scheduler_request(request)
            self._scheduler.limits.check_request(scheduled)
            params = sampling_params(request.sampling)
            constraint = self._constraint(request)
        except (RequestError, ConfigError) as error:
            raise RequestRefusedError(error.problem, found=error.found, fix=error.fix) from error
        with self._lock:
            status = self.status()
            if not (status.takes_requests and status.is_alive):
                raise EngineUnavailableError(
                    "the engine takes no requests",
                    found=status.detail or status.state,
                    fix="send the request again when /health says that the engine works",
                )
            if self._unfinished >= self._most:
                raise EngineQueueFullError(
                    "the queue of the engine is full",
                    found=f"{self._unfinished} requests",
                    fix="send the request again after one has ended",
                )
            self._unfinished += 1
            loop = asyncio.get_running_loop()
            submitted = _Submitted(request, scheduled, params, constraint, deliver, loop)
            self._commands.put(lambda: self._begin(submitted))

    def _constraint(self, request: EngineRequest) -> GrammarConstraint | None:
        if request.grammar is None:
            return None
        if self._grammars is None:
            raise ConfigError(
                "texts of this model cannot be constrained by a grammar",
                found="a tokenizer without bytes of its tokens, or without an end of documents",
                fix="leave the grammar out",
            )
        if request.min_new_tokens:
            raise ConfigError(
                "a text that has to match a grammar ends where it is complete",
                found=f"min_tokens {request.min_new_tokens}",
                fix="leave min_tokens out, and say the least length in the grammar",
            )
        return self._grammars.constraint(request.grammar, request.stop_tokens)

    def abort(self, request: str) -> None:
        self._commands.put(lambda: self._abort(request))

    def end_sample(self, request: str, sample: int) -> None:
        self._commands.put(lambda: self._end_sample(request, sample))

    def status(self) -> EngineStatus:
        status = self._status
        if not status.is_alive or status.state == "loading":
            return status
        silent_ns = self._clock_ns() - self._last_sign_ns
        if self._thread.is_alive() and silent_ns <= self._step_timeout_ns:
            return status
        detail = "its thread has ended"
        if self._thread.is_alive():
            detail = f"a step takes longer than {self._step_timeout_ns // _NS} seconds"
        return replace(status, is_alive=False, takes_requests=False, detail=detail)

    # The rest runs in the thread.

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._take_commands(wait=not self._submitted)
                self._last_sign_ns = self._clock_ns()
                if self._submitted and not self._is_stopping:
                    self._step()
                    self._report()
        except Exception as error:
            log.error(f"the engine has failed\n{traceback.format_exc()}")
            self._fail(f"a bug: {first_line(error)}")

    def _take_commands(self, *, wait: bool) -> None:
        try:
            self._commands.get(block=wait, timeout=_IDLE_S)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _begin(self, submitted: _Submitted) -> None:
        request = submitted.request
        try:
            submitted.sequences = self._scheduler.submit(submitted.scheduled)
        except Exception as error:
            if not isinstance(error, MegatronError):
                log.error(f"a request could not begin\n{traceback.format_exc()}")
            self._submitted[request.id] = submitted
            self._end(request.id, "failed", first_line(error))
            return
        self._submitted[request.id] = submitted
        for number, sequence in enumerate(submitted.sequences):
            constraint = submitted.constraint
            copied = None if constraint is None else constraint.copy()
            self._samples[sequence] = _Sample(submitted, number, copied)

    def _abort(self, request: str) -> None:
        self._scheduler.abort(request)
        self._take_ended()

    def _end_sample(self, request: str, sample: int) -> None:
        if (submitted := self._submitted.get(request)) is not None:
            self._scheduler.stop_sample(submitted.sequences[sample])
            self._take_ended()

    def _step(self) -> None:
        plan = self._scheduler.plan(self._clock_ns())
        self._take_ended()  # those whose deadline has come
        if not plan.slices:
            self._scheduler.complete({})
            return
        draws = {each.sequence: self._draw(each.sequence) for each in plan.slices if each.samples}
        try:
            results = self._executor.run(with_drafts(plan, self._drafts(plan, draws)), draws)
        except Exception as error:
            self._fail_step(error)
            return
        self._failures = 0
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
        if failed:
            self._scheduler.fail_sequences(failed)
        useful = (each for each in results if each.tokens and each.sequence not in failed)
        self._scheduler.complete({each.sequence: each.tokens for each in useful})
        generated = 0
        for part, result in zip(plan.slices, results, strict=True):
            if result.sequence not in failed:
                self._add_prompt_part(self._samples[part.sequence].request, part, result)
                generated += self._add_tokens(result)
        self._count_step(results, generated)
        self._take_ended()
        for submitted in self._submitted.values():
            self._send(submitted)

    def _drafts(
        self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]
    ) -> Mapping[int, Sequence[int]]:
        if self._drafter is None:
            return {}
        try:
            return self._drafter.propose(plan, draws)
        except Exception:
            log.error(f"no tokens are proposed from now on\n{traceback.format_exc()}")
            self._drafter = None
            return {}

    def _pool(self, submitted: _Submitted, part: SequenceSlice, hidden: Tensor) -> None:
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

    def _fail_step(self, error: Exception) -> None:
        self._failures += 1
        log.error(f"a step of the engine failed\n{traceback.format_exc()}")
        self._scheduler.fail_step(first_line(error))
        self._take_ended()
        if self._failures >= _MOST_FAILURES:
            self._fail(f"{self._failures} steps failed in a row: {first_line(error)}")

    def _draw(self, sequence: int) -> SequenceDraw:
        sample = self._samples[sequence]
        request = sample.request.request
        return SequenceDraw(
            params=sample.request.params,
            seed=request.sampling.seed,
            choice=sample.number,
            prompt=request.prompt,
            output=sample.output,
            constraint=sample.constraint,
            top_logprobs=request.logprobs,
        )

    def _add_prompt_part(
        self, submitted: _Submitted, part: SequenceSlice, result: SliceResult
    ) -> None:
        """Take what a step found of a prompt; what is computed again has the same bits."""
        if submitted.is_prompt_computed:
            return
        if submitted.cached is None:  # not again after a preemption
            submitted.cached = part.start
            if submitted.scheduled.reuses_prefix:
                self._status = replace(
                    self._status,
                    prefix_queries=self._status.prefix_queries + len(submitted.request.prompt),
                    prefix_hits=self._status.prefix_hits + part.start,
                )
        if result.targets:
            submitted.scores[part.start :] = [_score(each) for each in result.targets]
        if part.end >= len(submitted.request.prompt):
            submitted.is_prompt_computed = True
            is_scored = submitted.request.prompt_logprobs is not None
            scores = tuple(submitted.scores) if is_scored else None
            submitted.events.append(PromptComputed(scores, submitted.cached, submitted.embedding))

    def _count_step(self, results: Sequence[SliceResult], generated: int) -> None:
        status = self._status
        accepted = sum(len(each.tokens) - 1 for each in results if each.drafts)
        self._status = replace(
            status,
            generated_tokens=status.generated_tokens + generated,
            drafts=status.drafts + sum(each.drafts > 0 for each in results),
            draft_tokens=status.draft_tokens + sum(each.drafts for each in results),
            accepted_tokens=status.accepted_tokens + accepted,
        )

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

    def _take_ended(self) -> None:
        for end in self._scheduler.take_ended():
            self._end(end.request, _END_STATES[end.state.value], end.detail)

    def _end(self, name: str, state: EndState, detail: str) -> None:
        submitted = self._submitted.pop(name)
        for sequence in submitted.sequences:
            self._samples.pop(sequence, None)
        with self._lock:
            self._unfinished -= 1
        prompt_tokens = self._status.prompt_tokens + len(submitted.request.prompt)
        self._status = replace(self._status, prompt_tokens=prompt_tokens)
        submitted.events.append(RequestEnded(state, detail))
        self._send(submitted)

    def _send(self, submitted: _Submitted) -> None:
        events, submitted.events = submitted.events, []
        if not events:
            return
        try:
            submitted.loop.call_soon_threadsafe(_deliver_all, submitted.deliver, events)
        except RuntimeError:  # its event loop is closed: nobody is there to read
            log.debug(f"events of request {submitted.request.id} have no reader any more")

    def _report(self) -> None:
        counts = self._scheduler.counts
        preemptions = len(self._scheduler.take_preemptions())
        self._status = replace(
            self._status,
            running=counts.running,
            waiting=counts.waiting,
            used_blocks=counts.blocks.referenced,
            preemptions=self._status.preemptions + preemptions,
        )

    def _stop(self) -> None:
        self._set_state("stopped", takes_requests=False)
        self._end_all("the engine was stopped", "aborted")

    def _fail(self, detail: str) -> None:
        with self._lock:  # a request that is let in before is in the queue by now
            self._status = replace(
                self._status, state="failed", takes_requests=False, is_alive=False, detail=detail
            )
        self._end_all(detail, "failed")

    def _end_all(self, detail: str, state: EndState) -> None:
        """End every request, also those that have not been taken from the queue."""
        self._is_stopping = True
        while True:
            for name in list(self._submitted):
                self._end(name, state, detail)
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

    def _set_state(self, state: str, *, takes_requests: bool) -> None:
        with self._lock:
            self._status = replace(self._status, state=state, takes_requests=takes_requests)

    def _scheduler_request(self, request: EngineRequest) -> Request:
        return Request(
            id=request.id,
            prompt=request.prompt,
            max_new_tokens=request.max_new_tokens,
            arrival_ns=self._clock_ns(),
            deadline_ns=request.deadline_ns,
            samples=request.samples,
            stop_tokens=request.stop_tokens,
            min_new_tokens=request.min_new_tokens,
            salt=request.salt,
            prompt_logprobs=request.prompt_logprobs,
            embeds=request.embeds,
        )


_END_STATES: Mapping[str, EndState] = {
    "completed": "completed",
    "failed": "failed",
    "aborted": "aborted",
    "expired": "expired",
}


def sampling_params(options: SamplingOptions) -> SamplingParams:
    """Return the engine's way to say how tokens are drawn."""
    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=0.0 if options.top_p == 1 else options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=tuple(sorted(options.logit_bias.items())),
        greedy=options.greedy,
    )


def _score(logprobs: TokenLogprobs) -> TokenScore:
    return TokenScore(logprobs.chosen, logprobs.top)


def _deliver_all(deliver: Deliver, events: Sequence[EngineEvent]) -> None:
    for event in events:
        deliver(event)
