"""An engine of several replicas as the server sees it: requests go by way of the coordinator.

The coordinator gives a request to the replica with the fewest, and to another one if that replica
is lost and nothing has been sent yet; it gives every request exactly one end.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from megatron.control.client import new_id
from megatron.control.rank_thread import ControlThread
from megatron.errors import MegatronError, first_line
from megatron.scheduling.control.coordinator_state import CoordinatorState
from megatron.scheduling.control.messages import (
    MAX_PAYLOAD,
    Answer,
    Command,
    RequestDone,
    RequestProgress,
)
from megatron.scheduling.control.states import Code, CommandKind, ServingState
from megatron.serving.engine.engine_thread import EngineThread
from megatron.serving.engine_client import (
    END_STATES,
    EngineEvent,
    EngineQueueFullError,
    EngineRequest,
    EngineStatus,
    EngineUnavailableError,
    RequestEnded,
    RequestRefusedError,
    TokenDrawn,
)
from megatron.serving.ranks.payloads import decode_event, encode_request

_ANSWER_S = 10.0  # in which the coordinator of this process takes a request


@dataclass(frozen=True, slots=True)
class _Routed:
    """A request that has not ended, and where its events go."""

    deliver: Callable[[EngineEvent], None]
    loop: asyncio.AbstractEventLoop
    prompt_tokens: int


class RoutedEngine:
    """An `EngineClient` of all replicas.

    Args:
        local: the engine of this process, which has the limits of all.
        control: with the coordinator of all.
    """

    def __init__(self, local: EngineThread, control: ControlThread) -> None:
        self._local, self._control = local, control
        self._requests: dict[str, _Routed] = {}
        self._has_run = False
        self._prompt_tokens = self._generated_tokens = 0
        control.listen_to_requests(self._done, self._progress)

    def submit(self, request: EngineRequest, deliver: Callable[[EngineEvent], None]) -> None:
        self._local.check(request)
        payload, status = encode_request(request), self.status()
        if len(payload) > MAX_PAYLOAD:
            raise RequestRefusedError(
                "a request is too long to be sent to another replica",
                found=f"{len(request.prompt)} tokens of prompt",
                fix="shorten the prompt",
            )
        if not (status.takes_requests and status.is_alive):
            raise EngineUnavailableError(
                "the engine takes no requests",
                found=status.state if status.is_alive else status.detail or status.state,
                fix="send the request again when /health says that the engine works",
            )
        if len(self._requests) >= self._local.most_requests * len(status.live_replicas):
            raise EngineQueueFullError(
                "the queues of all replicas are full",
                found=f"{len(self._requests)} requests",
                fix="send the request again after one has ended",
            )
        loop = asyncio.get_running_loop()
        self._requests[request.id] = _Routed(deliver, loop, len(request.prompt))
        submit = Command(new_id(), CommandKind.SUBMIT, request=request.id, payload=payload)
        answer = self._control.send(submit, wait_s=_ANSWER_S)
        answer.add_done_callback(partial(self._answered, request.id))

    def abort(self, request: str) -> None:
        self.end_sample(request, -1)

    def end_sample(self, request: str, sample: int) -> None:
        if request in self._requests:
            command = Command(new_id(), CommandKind.ABORT, request=request, sample=sample)
            self._control.send(command, wait_s=_ANSWER_S)

    def status(self) -> EngineStatus:
        coordinator = self._control.coordinator
        state, local = coordinator.state, self._local.status()
        live = live_replicas(state)
        beats = [coordinator.beats[rank] for rank in live.values() if rank in coordinator.beats]
        self._has_run = self._has_run or state.state is ServingState.RUNNING
        is_alive = bool(live) or not self._has_run
        is_running = state.state is ServingState.RUNNING and state.transition is None
        lost = sorted(set(state.replicas) - set(live))
        names = ", ".join(map(str, lost))
        return replace(
            local,
            state=state.shown,
            takes_requests=is_running and is_alive,
            is_alive=is_alive and state.state is not ServingState.FAILED,
            detail=f"lost replicas: {names}" if lost and self._has_run else "",
            running=sum(beat.running for beat in beats),
            waiting=sum(beat.waiting for beat in beats),
            blocks=local.blocks * len(live),
            used_blocks=sum(local.blocks - beat.free_blocks for beat in beats),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            live_replicas=tuple(sorted(live)),
            lost_replicas=tuple(lost) if self._has_run else (),
        )

    # The rest runs in the thread of the control plane.

    def _answered(self, request: str, answer: "Future[Answer]") -> None:
        try:
            found = answer.result()
        except MegatronError as error:
            self._end(request, RequestEnded("failed", first_line(error)))
            return
        if found.code is not Code.ACCEPTED:
            self._end(request, RequestEnded("aborted", f"the engine is {found.state}"))

    def _progress(self, progress: RequestProgress) -> None:
        if (routed := self._requests.get(progress.request)) is not None:
            event = decode_event(progress.payload)
            self._generated_tokens += isinstance(event, TokenDrawn)
            _send(routed, event)

    def _done(self, done: RequestDone) -> None:
        self._end(done.request, RequestEnded(END_STATES.get(done.status, "failed"), done.detail))

    def _end(self, request: str, event: RequestEnded) -> None:
        if (routed := self._requests.pop(request, None)) is not None:
            self._prompt_tokens += routed.prompt_tokens
            _send(routed, event)


def live_replicas(state: CoordinatorState) -> dict[int, int]:
    """Return the first rank of each replica that takes part."""
    return {
        replica: state.replicas.index(replica)
        for replica in sorted({state.replicas[member] for member in state.members})
    }


def _send(routed: _Routed, event: EngineEvent) -> None:
    try:
        routed.loop.call_soon_threadsafe(routed.deliver, event)
    except RuntimeError:  # its event loop is closed: nobody is there to read
        return
