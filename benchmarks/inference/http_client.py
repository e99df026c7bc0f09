"""A small HTTP client on one connection a request, which notes when each piece of an answer came.

It can leave in the middle of an answer. Neither deadlines nor retries: both are the caller's.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import h11

_READ_BYTES = 1 << 16


@dataclass(slots=True)
class HttpAnswer:
    """An answer as it came.

    Attributes:
        status: 0 if none came.
        pieces: the body with the seconds of the clock at which each piece came.
        is_complete: whether its end came.
        has_left: whether the client left before it.
    """

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    is_complete: bool = False
    has_left: bool = False

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(piece for _, piece in self.pieces)

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    def events(self) -> Iterator[tuple[float, str]]:
        """Yield the data of each complete event of a stream, with the time of its last piece."""
        rest = ""
        for came, piece in self.pieces:
            *parts, rest = (rest + piece.decode()).split("\n\n")
            for part in parts:
                if part.startswith("data: "):
                    yield came, part.removeprefix("data: ")


async def http_request(
    port: int, method: str, path: str, body: bytes = b"", *, leave_after: int | None = None
) -> HttpAnswer:
    """Send a request to the loopback interface and return its answer.

    Args:
        leave_after: close the connection after so many pieces of the body; 0: once it is sent.

    Raises:
        OSError: no connection is made, or it breaks before the answer begins.
    """
    answer = HttpAnswer()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    connection = h11.Connection(h11.CLIENT)
    headers = [("host", "127.0.0.1"), ("content-type", "application/json"), ("connection", "close")]
    headers.append(("content-length", str(len(body))))
    request = connection.send(h11.Request(method=method, target=path, headers=headers))
    sent = connection.send(h11.Data(data=body)), connection.send(h11.EndOfMessage())
    try:
        writer.write(b"".join(part for part in (request, *sent) if part))
        await writer.drain()
        while leave_after is None or len(answer.pieces) < leave_after:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.Response):
                answer.status = event.status_code
            elif isinstance(event, h11.Data):
                answer.pieces.append((time.monotonic(), bytes(event.data)))
            else:
                answer.is_complete = isinstance(event, h11.EndOfMessage)
                return answer
        answer.has_left = True
    except (h11.RemoteProtocolError, ConnectionError) as error:
        if answer.status == 0:  # else it is an answer that breaks off
            raise ConnectionError(f"{method} {path}: {error}") from error
    finally:
        writer.transport.abort()
    return answer
