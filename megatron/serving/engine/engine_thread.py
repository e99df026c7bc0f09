"""An engine in a thread of its own: it alone touches the scheduler and the model.

Commands reach the thread through a queue, and `RunningRequests` sends events back. The scheduler
gets time as integers of the monotonic clock. A step that fails ends the requests in it; several in
a row end the engine, with every request. Nobody waits for an engine that is gone. Where the limits
allow several steps in flight the next is begun before the oldest is waited for; whatever is no step
happens when none is.
"""

import asyncio
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, NoReturn, Protocol, TypeAlias

from megatron import log
from megatron.errors import MegatronError, first_line
from megatron.inference.constraint import GrammarTable
from megatron.inference.drafts import Drafter
from megatron.inference.forward import SliceResult
from megatron.inference.pooling import Pooling
from megatron.inference.sampling import SequenceDraw
from megatron.scheduling.control.member import EngineTask, PrepareDone, TaskKind
from megatron.scheduling.control.timing import ControlTiming
from megatron.scheduling.forward_plan import ForwardPlan
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.replay import LeadingScheduler
from megatron.scheduling.requests import RequestError
from megatron.scheduling.scheduler import Scheduler
from megatron.serving.engine.checked_request import CheckedRequest, checked_request
from megatron.serving.engine.running_requests import Deliver, RunningRequests, SubmittedRequest
from megatron.serving.engine_client import (
    END_STATES,
    EndState,
    EngineQueueFullError,
    EngineRequest,
    EngineStatus,
    EngineUnavailableError,
)
from megatron.serving.ranks.engine_transitions import EngineTransitions, QueuedTransitions
from megatron.serving.ranks.rank_model import RankModel
from megatron.serving.ranks.round_log import (
    IDLE_ROUND_NS,
    EngineEnd,
    EngineStep,
    IdleRound,
    LocalLog,
    RoundLog,
)

STEP_TIMEOUT_S = 60.0  # after which a step counts as one that does not end
_MOST_FAILURES = 3  # failed steps in a row
_IDLE_S = 0.5  # how often an idle engine says that it lives
_NS = 1_000_000_000
_APART = "the ranks of the engine can no longer compute together"

Command: TypeAlias = Callable[[], None]


class StepExecutor(Protocol):
    """What computes a step, such as `inference.forward.ForwardExecutor`."""

    def start(
        self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]
    ) -> Callable[[], Sequence[SliceResult]]: ...


class _StepUnderWay(NamedTuple):
    """A step that was begun, and what waits for its results."""

    plan: ForwardPlan
    results: Callable[[], Sequence[SliceResult]]


SERVING_TIMING = ControlTiming(fence_ns=3 * _NS, lease_ns=5 * _NS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAbilities:
    """What an engine can do beside drawing tokens.

    Attributes:
        drafter: proposes tokens, for which the limits have room; one that fails is not used again.
        grammars: makes constraints of grammars; None: requests have none.
        pooling: what becomes of hidden states that are asked for.
    """

    drafter: Drafter | None = None
    grammars: GrammarTable | None = None
    pooling: Pooling = Pooling.MEAN


class _Controlled:
    """An engine as its transitions use it, in its thread."""

    def __init__(self, engine: "EngineThread") -> None:
        self._engine = engine

    @property
    def unfinished(self) -> int:
        return self._engine._unfinished  # with those that are in the queue of commands

    def held_blocks(self) -> Sequence[int]:
        return self._engine._scheduler.pool.held

    def show(self, state: str, *, takes_requests: bool) -> None:
        self._engine._set_state(state, takes_requests=takes_requests)

    def abort_all(self, detail: str) -> None:
        for name in self._engine._requests.names:
            self._engine._leading.abort(name)
        self._engine._take_ended(detail)

    def drop_cache(self, weights_version: int | None) -> None:
        self._engine._leading.drop_cache(weights_version)

    def end(self) -> None:
        self._engine._stop()


class EngineThread:
    """An `EngineClient` of a scheduler and a model in this process.

    Args:
        is_batch_invariant: what a probe of the executor found; shown in the state.
        ranks: the log that other ranks of the engine follow; they have the same limits.
        model: what transitions of the control plane change on this rank.
        clock_ns: the monotonic clock.
    """

    def __init__(
        self,
        executor: StepExecutor,
        limits: SchedulerLimits,
        *,
        abilities: EngineAbilities | None = None,
        step_timeout_s: float = STEP_TIMEOUT_S,
        is_batch_invariant: bool | None = None,
        ranks: RoundLog | None = None,
        model: RankModel | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._executor = executor
        able = abilities or EngineAbilities()
        self._drafter, self._grammars = able.drafter, able.grammars
        self._requests = RunningRequests(able.pooling)
        self._scheduler = Scheduler(queue_limits(limits))
        self._most = self._scheduler.limits.max_queued
        self._leading, self._ranks = LeadingScheduler(self._scheduler), ranks or LocalLog()
        self.report: Callable[[PrepareDone], None] = _ignore
        self._transitions = EngineTransitions(
            _Controlled(self), self._ranks, model, lambda done: self.report(done)
        )
        self._queued = QueuedTransitions()  # guarded by the lock
        self.on_failure: Callable[[str], None] = _ignore  # of the engine, whoever else takes part
        self._lost: str | None = None  # why it counts as failed, whatever its thread does
        self._preparation_ns = 0  # that a transition may take, beside the time of a step
        self._clock_ns = clock_ns
        self._step_timeout_ns = int(step_timeout_s * _NS)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._failures, self._is_stopping = 0, False
        self._under_way: deque[_StepUnderWay] = deque()  # the oldest first
        self._round_ns = clock_ns()  # of the last round
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

    @property
    def most_requests(self) -> int:
        """Most requests that run or wait at once."""
        return self._most

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; return whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def start(self, report: Callable[[PrepareDone], None] | None = None) -> None:
        """Begin to compute.

        Args:
            report: gets what became of preparations; requests are taken once the control plane has
                started the engine. None: nothing else starts it.
        """
        if report is None:
            self._set_state("running", takes_requests=True)
        else:
            self.report = report
        self._thread.start()

    @property
    def settled_epoch(self) -> int:
        """The newest transition of the control plane that the engine has made or undone."""
        return self._transitions.settled_epoch

    def take_task(self, task: EngineTask) -> None:
        """Do what the control plane asks this engine for, between two steps; from any thread."""
        if task.kind is TaskKind.RESET:
            self.lose(task.detail)
            return
        with self._lock:
            self._queued.add(task)
            self._commands.put(lambda: self._take_task(task))

    def lose(self, detail: str) -> None:
        """Count the engine as failed, also while its thread waits for a rank; from any thread."""
        self._lost = detail

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End all requests and the thread; return whether it has ended in time."""
        self._commands.put(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, request: EngineRequest, deliver: Deliver) -> None:
        checked = self.check(request)
        with self._lock:
            status = self.status()
            takes_requests = status.takes_requests or self._queued.takes_requests
            if not (takes_requests and status.is_alive):
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
            submitted = SubmittedRequest(checked, deliver, loop)
            self._commands.put(lambda: self._begin(submitted))

    def check(self, request: EngineRequest) -> CheckedRequest:
        """Return a request with what this engine makes of it; raises RequestRefusedError."""
        limits, now_ns = self._scheduler.limits, self._clock_ns()
        return checked_request(request, limits, self._grammars, arrival_ns=now_ns)

    def abort(self, request: str) -> None:
        self._commands.put(lambda: self._abort(request))

    def end_sample(self, request: str, sample: int) -> None:
        self._commands.put(lambda: self._end_sample(request, sample))

    def status(self) -> EngineStatus:
        status = self._status
        if status.state == "stopped":
            return replace(status, is_alive=False, detail="it was stopped")
        if self._lost is not None:
            return replace(
                status, state="failed", is_alive=False, takes_requests=False, detail=self._lost
            )
        if not status.is_alive or status.state == "loading":
            return status
        silent_ns = self._clock_ns() - self._last_sign_ns - self._preparation_ns
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
                computes = bool(self._requests) and not self._transitions.is_held
                self._take_commands(wait=not computes and not self._under_way)
                self._last_sign_ns = self._clock_ns()
                if self._is_stopping:
                    return
                if self._requests and not self._transitions.is_held:
                    self._step()
                elif self._under_way:  # of requests that have ended
                    self._finish_step()
                elif self._round_ns + IDLE_ROUND_NS <= self._last_sign_ns:
                    self._round_ns = self._last_sign_ns
                    self._ranks.send(IdleRound())
                self._report()
                self._transitions.poll()
        except Exception as error:
            log.error(f"the engine has failed\n{traceback.format_exc()}")
            self._fail(f"{_APART if self._ranks.has_followers else 'a bug'}: {first_line(error)}")

    def _take_commands(self, *, wait: bool) -> None:
        try:
            self._commands.get(block=wait, timeout=_IDLE_S)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _take_task(self, task: EngineTask) -> None:
        if task.kind is TaskKind.PREPARE and task.prepare is not None:
            kind, remaining_ms = task.prepare.transition, task.prepare.remaining_ms
            self._preparation_ns = SERVING_TIMING.preparation_ns(kind, remaining_ms)
        self._finish_all()
        self._transitions.take(task)
        self._last_sign_ns, self._preparation_ns = self._clock_ns(), 0

    def _begin(self, submitted: SubmittedRequest) -> None:
        request = submitted.request
        try:
            sequences = self._leading.submit(submitted.checked.scheduled)
        except Exception as error:
            if not isinstance(error, MegatronError):
                log.error(f"a request could not begin\n{traceback.format_exc()}")
            self._requests.add(submitted, ())
            if not self._has_failed_apart(error):
                self._end(request.id, "failed", first_line(error))
            return
        self._requests.add(submitted, sequences)

    def _abort(self, request: str) -> None:
        self._leading.abort(request)
        self._take_ended()

    def _end_sample(self, request: str, sample: int) -> None:
        if (submitted := self._requests.get(request)) is not None:
            self._leading.stop_sample(submitted.sequences[sample])
            self._take_ended()

    def _step(self) -> None:
        """Begin a step if one may be in flight beside the others, or wait for the oldest."""
        begins = self._scheduler.may_plan and self._begin_step()
        if not begins or len(self._under_way) == self._scheduler.limits.steps_in_flight:
            self._finish_step()

    def _finish_all(self) -> None:
        """Wait for all steps that were begun."""
        while self._under_way:
            self._finish_step()

    def _begin_step(self) -> bool:
        """Plan a step, tell the others, and begin it; return whether there was anything to do."""
        self._round_ns = self._clock_ns()
        draws: dict[int, SequenceDraw] = {}

        def propose(planned: ForwardPlan) -> Mapping[int, Sequence[int]]:
            draws.update(self._requests.draws(planned))
            return self._drafts(planned, draws)

        plan, record = self._leading.plan(self._round_ns, propose)
        self._ranks.send(EngineStep(record))
        self._take_ended()  # those whose deadline has come
        if not plan.slices:
            return False
        try:
            results = self._executor.start(plan, draws)
        except Exception as error:
            results = partial(_raise, error)  # when the steps before it have ended
        self._under_way.append(_StepUnderWay(plan, results))
        return True

    def _finish_step(self) -> None:
        """Wait for the results of the oldest step, if any; take those of requests that go on."""
        if not self._under_way:
            return
        step = self._under_way.popleft()
        try:
            results = step.results()
        except Exception as error:
            self._fail_step(error)
            return
        self._failures = 0
        counting = self._scheduler.counting()
        failed = {
            each.sequence: "it has ended"
            for each in results
            if not each.is_finite and each.sequence not in counting
        }
        kept = [each for each in results if each.sequence in counting]
        slices = tuple(each for each in step.plan.slices if each.sequence in counting)
        plan = replace(step.plan, slices=slices)
        failed |= self._requests.failures(plan, kept)
        if failed:
            self._leading.fail_sequences(failed)
        useful = (each for each in results if each.tokens and each.sequence not in failed)
        self._leading.complete({each.sequence: each.tokens for each in useful})
        counts = self._requests.add_step(plan, kept, failed)
        status = self._status
        added = {name: getattr(status, name) + more for name, more in counts._asdict().items()}
        self._status = replace(status, **added)
        self._take_ended()
        self._requests.send()

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

    def _fail_step(self, error: Exception) -> None:
        self._failures += 1
        log.error(f"a step of the engine failed\n{traceback.format_exc()}")
        if self._has_failed_apart(error):
            return
        self._leading.fail_step(first_line(error))
        self._take_ended()
        if self._failures >= _MOST_FAILURES:
            self._fail(f"{self._failures} steps failed in a row: {first_line(error)}")

    def _has_failed_apart(self, error: Exception) -> bool:
        """End an engine of several ranks after an error that the others may not have found.

        Returns:
            Whether it has ended, with all requests.
        """
        is_of_request = isinstance(error, RequestError)  # found before anything is computed
        if not self._ranks.has_followers or is_of_request:
            return False
        self._fail(f"{_APART}: {first_line(error)}")
        return True

    def _take_ended(self, detail: str | None = None) -> None:
        for end in self._scheduler.take_ended():
            self._end(end.request, END_STATES[end.state.value], detail or end.detail)

    def _end(self, name: str, state: EndState, detail: str) -> None:
        request = self._requests.end(name, state, detail)
        with self._lock:
            self._unfinished -= 1
        prompt_tokens = self._status.prompt_tokens + len(request.prompt)
        self._status = replace(self._status, prompt_tokens=prompt_tokens)

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
        if self._under_way:
            self._finish_all()
            if self._is_stopping:
                return  # one of them has ended the engine
        self._set_state("stopped", takes_requests=False)
        self._end_all("the engine was stopped", "aborted")
        self._ranks.send(EngineEnd("the engine was stopped"))

    def _fail(self, detail: str) -> None:
        with self._lock:  # a request that is let in before is in the queue by now
            self._status = replace(
                self._status, state="failed", takes_requests=False, is_alive=False, detail=detail
            )
        self._end_all(detail, "failed")
        self.on_failure(detail)

    def _end_all(self, detail: str, state: EndState) -> None:
        """End every request, also those that have not been taken from the queue."""
        self._is_stopping = True
        self._under_way.clear()
        while True:
            for name in self._requests.names:
                self._end(name, state, detail)
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

    def _set_state(self, state: str, *, takes_requests: bool) -> None:
        with self._lock:
            self._status = replace(self._status, state=state, takes_requests=takes_requests)


def queue_limits(limits: SchedulerLimits) -> SchedulerLimits:
    """Return the limits of the scheduler of an engine: requests that run count as queued, too.

    Callers get an answer at once, when it is not known yet how many will run.
    """
    return replace(limits, max_queued=limits.max_queued + limits.max_sequences)


def _raise(error: Exception) -> NoReturn:
    raise error


def _ignore(message: object) -> None:
    """Ignore a message for the control plane: there is none."""
