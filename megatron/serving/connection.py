"""Connections that come slowly, stop reading, or are too many: what uvicorn leaves to its users.

A connection has a deadline for the headers of each request and for its body, and is dropped when
its client reads nothing. uvicorn's timers are for connections without a request alone.
"""

import asyncio
from collections.abc import Callable
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.serving.limits import ServerLimits

_GRACE_S = 2.0  # after the deadline of a body, which the application answers by itself first
_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 0\r\n\r\n"
)


def limited_protocol(limits: ServerLimits) -> type[H11Protocol]:
    """Return uvicorn's protocol with the limits of a server."""

    class LimitedProtocol(_LimitedProtocol):
        server_limits = limits

    return LimitedProtocol


class _LimitedProtocol(H11Protocol):
    server_limits: ClassVar[ServerLimits]
    _reading: asyncio.TimerHandle | None = None  # until headers or body have to be there
    _reads_body = False
    _writing: asyncio.TimerHandle | None = None  # until the client has to read something

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.server_limits.max_connections:
            transport.write(_FULL)
            transport.close()
        else:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        if self._reading is None and self.conn.their_state is h11.IDLE:
            self._expect_headers()
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()
        if self.transport.is_closing():  # it stays open until the client has read all
            self._expect_reader()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing = _cancel(self._writing)

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading, self._writing = _cancel(self._reading), _cancel(self._writing)
        super().connection_lost(exc)

    def _follow(self) -> None:
        """Set the timer that belongs to what the client sends next."""
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            if not self._reads_body:
                self._reads_body = True
                self._restart(self.server_limits.body_timeout + _GRACE_S, self.transport.abort)
        elif state is h11.IDLE and (self.conn.trailing_data[0] or self._waits_for_headers):
            if not self._waits_for_headers:
                self._expect_headers()
        else:
            self._reads_body, self._reading = False, _cancel(self._reading)

    @property
    def _waits_for_headers(self) -> bool:
        return self._reading is not None and not self._reads_body

    def _expect_headers(self) -> None:
        self._reads_body = False
        self._restart(self.server_limits.header_timeout, self._refuse_slow_headers)

    def _expect_reader(self) -> None:
        if self._writing is None:
            self._writing = self.loop.call_later(
                self.server_limits.client_timeout, self.transport.abort
            )

    def _refuse_slow_headers(self) -> None:
        self.transport.write(_SLOW)
        self.transport.close()
        self._expect_reader()

    def _restart(self, seconds: float, action: Callable[[], object]) -> None:
        _cancel(self._reading)
        self._reading = self.loop.call_later(seconds, action)


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer; return None, which stands for it from now on."""
    if timer is not None:
        timer.cancel()
    return None
