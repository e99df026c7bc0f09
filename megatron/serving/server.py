"""Serves an application on a port until it is told to stop, and lets running requests finish.

After SIGTERM or SIGINT new requests get 503 while those that run go on; when they have ended, or
their time is over, the port closes. A second signal ends them at once.
"""

import asyncio
import errno
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from megatron import log
from megatron.errors import ConfigError, MachineError, MegatronError
from megatron.launch import API_KEY, api_key_from_environment
from megatron.serving.app import server_app
from megatron.serving.connection import limited_protocol
from megatron.serving.generation import ServerBackend
from megatron.serving.ranks.operator_api import OperatorPaths

_BACKLOG = 1024
_LOOK_S = 0.25  # how often an engine that may be lost is looked at
_FLUSH_S = 2.0  # in which clients get the errors of requests that were ended
_CLOSE_S = 5
_SHORTEST_KEY = 16
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class DrainTimeoutError(MegatronError):
    """The server stopped before all requests had ended."""


class EngineLostError(MachineError):
    """The engine behind the server has failed, and the server with it."""


def api_keys(path: Path | None) -> tuple[str, ...]:
    """Return the API keys: one per line of a file, and that of the environment; none for neither.

    They are masked in all messages from now on.

    Raises:
        ConfigError: the file cannot be read or has no key, or a key is too short or not plain.
    """
    sources = {API_KEY: [key]} if (key := api_key_from_environment()) is not None else {}
    return _checked_keys(sources, path, "--api-key-file")


def control_keys(path: Path | None) -> tuple[str, ...]:
    """Return the keys of operators, as `api_keys`; none without a file."""
    return _checked_keys({}, path, "--control-key-file")


def _checked_keys(sources: dict[str, list[str]], path: Path | None, flag: str) -> tuple[str, ...]:
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "the file of API keys cannot be read",
                found=f"{flag} {path}: {error}",
                fix="give a text file with one key per line, which only you can read",
            ) from error
        sources[f"{flag} {path}"] = [line.strip() for line in lines if line.strip()]
    for source, keys in sources.items():
        lengths = [len(key) for key in keys if len(key) < _SHORTEST_KEY or not _is_plain(key)]
        if lengths or not keys:
            raise ConfigError(
                "an API key is too easy to guess, or cannot stand in a header",
                found=f"{source}: " + (f"one of {lengths[0]} characters" if keys else "no keys"),
                fix=f"use {_SHORTEST_KEY} or more ASCII characters without spaces: "
                "openssl rand -hex 32",
            )
    found = tuple(key for keys in sources.values() for key in keys)
    log.hide(found)
    return found


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine can connect to an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, keys: Collection[str]) -> None:
    """Check that a server that other machines can reach asks for a key; raises ConfigError."""
    if not keys and not is_loopback(host):
        raise ConfigError(
            "other machines could use the server without a key",
            found=f"--host {host}, no API keys",
            fix=f"give --api-key-file FILE or set {API_KEY}, or leave --host out",
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address.

    Raises:
        ConfigError: it is in use, not allowed, or not of this machine.
    """
    if not 0 <= port < 1 << 16:  # the system would take another one
        raise _cannot_listen(host, port, OverflowError("there is no such port"))
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def serve(server: "TextServer", listener: socket.socket) -> None:
    """Serve until a signal, then until running requests have ended.

    Raises:
        DrainTimeoutError: requests were ended because their time was over.
        EngineLostError: the engine failed, and the server was to end with it.
    """
    server.run(sockets=[listener])
    if server.engine_failure is not None:
        raise EngineLostError(
            "the engine no longer works",
            found=server.engine_failure,
            fix="read the messages of the other ranks, and start all of them again",
        )
    if server.ended_early:
        raise DrainTimeoutError(
            "the server stopped before all requests had ended",
            found=f"{server.ended_early} requests after {server.drain_timeout} seconds",
            fix="raise --drain-timeout, or lower --request-timeout",
        )


class TextServer(uvicorn.Server):
    """uvicorn's server with limits on connections, and with signals that let requests finish.

    Args:
        on_start: called when connections are answered.
        ends_with_engine: whether an engine that has failed ends the server, as it ends its ranks.
        operators: what answers the paths of operators; None: they are unknown.

    Attributes:
        engine_failure: why the server ended with the engine.
        ended_early: requests that were ended because their time was over.
    """

    def __init__(
        self,
        backend: ServerBackend,
        *,
        host: str,
        keys: Collection[str] = (),
        is_strict: bool = False,
        on_start: Callable[[], None] = lambda: None,
        ends_with_engine: bool = False,
        operators: ASGIApp | None = None,
    ) -> None:
        limits = backend.limits
        app = server_app(backend, keys=keys, is_local=is_loopback(host), is_strict=is_strict)
        self.engine_failure: str | None = None
        self._engine, self._ends_with_engine = backend.engine, ends_with_engine
        self._looking: asyncio.Task[None] | None = None
        super().__init__(
            uvicorn.Config(
                app if operators is None else OperatorPaths(app, operators),
                http=limited_protocol(limits),
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=limits.idle_timeout,
                timeout_graceful_shutdown=_CLOSE_S,
                h11_max_incomplete_event_size=limits.max_header_bytes,
                backlog=_BACKLOG,
            )
        )
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # answers and errors are ours
        self.ended_early, self.drain_timeout = 0, limits.drain_timeout
        self._admission, self._on_start = backend.admission, on_start
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._looking = asyncio.ensure_future(self._look_at_engine())
        self._on_start()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for each in _SIGNALS:
            loop.add_signal_handler(each, self.stop)
        try:
            yield
        finally:
            for each in _SIGNALS:
                loop.remove_signal_handler(each)

    def stop(self) -> None:
        """Begin to drain; called again, end all requests at once."""
        if self._drain is None:
            jobs = self._admission.jobs
            log.info(f"stopping: {jobs} requests have {self.drain_timeout} s to end")
            self._drain = asyncio.ensure_future(self._drained(self.drain_timeout))
        else:
            self._drain.cancel()
            self._drain = asyncio.ensure_future(self._drained(0))

    async def _look_at_engine(self) -> None:
        """End the server a moment after its engine, when clients have the errors."""
        while (status := self._engine.status()).is_alive or not self._ends_with_engine:
            if status.state == "stopped":  # by the control plane
                break
            await asyncio.sleep(_LOOK_S)
        if status.state == "stopped":
            if self._drain is None:
                self.stop()
            return
        self.engine_failure = status.detail or status.state
        log.error(f"the engine no longer works: {self.engine_failure}")
        await asyncio.sleep(_FLUSH_S)
        await self._drained(0)

    async def _drained(self, timeout_s: float) -> None:
        self.ended_early = await self._admission.drain(timeout_s)
        if self.ended_early:
            await self._admission.drain(_FLUSH_S)
        self.should_exit = True


def _is_plain(key: str) -> bool:
    return key.isascii() and key.isprintable() and " " not in key


def _cannot_listen(host: str, port: int, error: OSError | OverflowError) -> ConfigError:
    problems = {
        errno.EADDRINUSE: ("the port is in use", "use another --port, or 0 for any free one"),
        errno.EACCES: ("the port is not allowed for you", "use a --port from 1024 to 65535"),
    }
    problem, fix = problems.get(
        getattr(error, "errno", 0) or 0,
        ("the server cannot listen there", "use a --host of this machine and a --port below 65536"),
    )
    return ConfigError(problem, found=f"--host {host} --port {port}: {error}", fix=fix)
