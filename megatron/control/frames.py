"""Messages on a stream: four bytes with the length of what follows, the most significant first."""

import asyncio
import struct

from megatron.scheduling.control.messages import MAX_MESSAGE_BYTES, MessageError

FRAME_S = 5.0  # from the first byte of a frame to its last
CONNECT_S = 5.0
MAX_BACKLOG_BYTES = 4 * MAX_MESSAGE_BYTES  # of a receiver that is too slow
_LENGTH = struct.Struct(">I")


def frame_of(data: bytes) -> bytes:
    """Return a message with its length before it."""
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader, wait_s: float) -> bytes | None:
    """Return the next message; None when the other side has closed the stream.

    Args:
        wait_s: how long to wait for its first byte; the rest has to follow within `FRAME_S`.

    Raises:
        MessageError: the stream ends within a message, or the message is too long.
        TimeoutError: it has not come in time.
    """
    async with asyncio.timeout(wait_s):
        first = await reader.read(1)
    if not first:
        return None
    try:
        async with asyncio.timeout(FRAME_S):
            header = first + await reader.readexactly(_LENGTH.size - 1)
            (length,) = _LENGTH.unpack(header)
            if length > MAX_MESSAGE_BYTES:
                raise _refusal("a message is too long", f"{length} bytes")
            return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise _refusal("a stream ends within a message", f"{len(error.partial)} bytes") from None


async def close_writer(writer: asyncio.StreamWriter) -> None:
    """Close a stream, without waiting for a receiver that does not read."""
    writer.close()
    try:
        async with asyncio.timeout(FRAME_S):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        writer.transport.abort()


def _refusal(problem: str, found: str) -> MessageError:
    return MessageError(
        problem,
        found=f"{found}, at most {MAX_MESSAGE_BYTES}",
        fix="use the client of this version",
    )
