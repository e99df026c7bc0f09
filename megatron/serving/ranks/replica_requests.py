"""Requests that the coordinator gives to the engine of this replica, and what becomes of them.

Everything here runs in the thread of the control plane and returns at once.
"""

from collections.abc import Callable
from functools import partial

from megatron.errors import MegatronError, first_line
from megatron.scheduling.control.messages import (
    MAX_PAYLOAD,
    RequestAbort,
    RequestDone,
    RequestProgress,
    RequestStart,
    ToCoordinator,
)
from megatron.serving.engine_client import (
    EngineClient,
    EngineEvent,
    EngineQueueFullError,
    EngineUnavailableError,
    RequestEnded,
)
from megatron.serving.ranks.payloads import decode_request, encode_event

_MOST_DETAIL = 1000  # characters


class ReplicaRequests:
    """The requests of one replica.

    Args:
        engine: of its first rank, which is this one.
        send: sends a message to the coordinator.
    """

    def __init__(self, engine: EngineClient, send: Callable[[ToCoordinator], None]) -> None:
        self._engine, self._send = engine, send

    def take(self, message: RequestStart | RequestAbort) -> None:
        """Begin or end a request."""
        if isinstance(message, RequestStart):
            self._start(message)
        elif message.sample < 0:
            self._engine.abort(message.request)
        else:
            self._engine.end_sample(message.request, message.sample)

    def _start(self, message: RequestStart) -> None:
        place = (message.member, message.incarnation, message.request)
        try:
            request = decode_request(message.payload)
            self._engine.submit(request, partial(self._deliver, place))
        except (EngineUnavailableError, EngineQueueFullError) as error:
            # It has paused meanwhile, and the coordinator will know: worth another try.
            self._send(RequestDone(*place, "aborted", first_line(error)[:_MOST_DETAIL]))
        except MegatronError as error:
            self._send(RequestDone(*place, "failed", first_line(error)[:_MOST_DETAIL]))

    def _deliver(self, place: tuple[int, int, str], event: EngineEvent) -> None:
        if isinstance(event, RequestEnded):
            self._send(RequestDone(*place, event.state, event.detail[:_MOST_DETAIL]))
            return
        payload = encode_event(event)
        if len(payload) > MAX_PAYLOAD:  # the scores of a long prompt
            self._engine.abort(place[2])
            self._send(RequestDone(*place, "failed", "its scores are too long to be sent"))
            return
        self._send(RequestProgress(*place, payload))
