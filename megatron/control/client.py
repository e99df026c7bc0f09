"""A client of the coordinator: every command has an answer or an error within its time."""

import asyncio
import secrets
from collections.abc import Callable

from megatron.control.frames import CONNECT_S, close_writer, frame_of, read_frame
from megatron.errors import MachineError
from megatron.scheduling.control.messages import (
    Answer,
    Command,
    MessageError,
    RequestDone,
    RequestProgress,
    decode_message,
    encode_message,
)
from megatron.scheduling.control.states import CommandKind, Mode

IDLE_S = 3600.0


def new_id() -> str:
    """Return an id for a command."""
    return secrets.token_hex(8)


class ControlTimeoutError(MachineError):
    """The coordinator has not answered a command in time; what became of it is not known."""


class ControlConnectionError(MachineError):
    """There is no connection to the coordinator."""


class ControlClient:
    """One connection.

    Args:
        on_done: gets the end of each request that was submitted here.
        on_progress: gets what comes of their answers before.
    """

    def __init__(
        self,
        on_done: Callable[[RequestDone], None],
        on_progress: Callable[[RequestProgress], None] = lambda progress: None,
    ) -> None:
        self._on_done, self._on_progress = on_done, on_progress
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._address = ""

    async def connect(self, host: str, port: int, *, secret: bytes | None = None) -> None:
        """Connect to a coordinator, with the secret that it wants a connection to begin with.

        Raises:
            ControlConnectionError: nobody answers there.
        """
        self._address = f"{host}:{port}"
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, self._writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError) as error:
            raise self._not_connected(str(error) or type(error).__name__) from None
        if secret is not None:
            self._writer.write(frame_of(secret))
        self._reading = asyncio.create_task(self._read(reader, self._writer))

    async def ask(
        self,
        command: CommandKind,
        mode: Mode = Mode.DEFAULT,
        *,
        request: str = "",
        weights: int = 0,
        remaining_ms: int = 0,
        wait_s: float = 90.0,
        name: str = "",
    ) -> Answer:
        """Send a command of these fields, under a new id unless it has a name; see `send`."""
        asked = Command(name or new_id(), command, mode, request, weights, remaining_ms)
        return await self.send(asked, wait_s=wait_s)

    async def send(self, asked: Command, *, wait_s: float = 90.0) -> Answer:
        """Send a command; return its answer.

        A command that is sent again under its id, after a time-out or over another connection, is
        done once.

        Args:
            wait_s: longer than the transition may take.

        Raises:
            ControlTimeoutError: there is no answer in time.
            ControlConnectionError: the connection is broken.
        """
        name, command = asked.id, asked.command
        if self._writer is None or self._writer.is_closing():
            raise self._not_connected("the connection is closed")
        answer = self._waiting.setdefault(name, asyncio.get_running_loop().create_future())
        self._writer.write(frame_of(encode_message(asked)))
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(answer)
        except TimeoutError:
            raise ControlTimeoutError(
                f"the coordinator has not answered {command}",
                found=f"nothing from {self._address} in {wait_s:g} s",
                fix=f"ask for its status, or send the command again with the id {name}",
            ) from None
        finally:
            self._waiting.pop(name, None)

    async def close(self) -> None:
        """Close the connection; requests that were submitted here are aborted."""
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            await close_writer(self._writer)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reason = "the coordinator has closed the connection"
        try:
            while (data := await read_frame(reader, IDLE_S)) is not None:
                message = decode_message(data)
                if isinstance(message, RequestDone):
                    self._on_done(message)
                elif isinstance(message, RequestProgress):
                    self._on_progress(message)
                elif isinstance(message, Answer) and message.id in self._waiting:
                    self._waiting.pop(message.id).set_result(message)
        except (MessageError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
        finally:
            writer.close()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(self._not_connected(reason))

    def _not_connected(self, reason: str) -> ControlConnectionError:
        return ControlConnectionError(
            "there is no connection to the coordinator of the engine",
            found=f"{self._address or 'no address'}: {reason}",
            fix="check that the engine runs, and connect again",
        )
