"""The paths of operators: pause, suspend, resume, new weights, stop, and the state of all ranks.

Every answer has the state, the number of the transition and a verdict of each rank. An engine that
cannot do what is asked is no reason to ask again: clients are told so.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Annotated, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron.control.client import ControlConnectionError, ControlTimeoutError, new_id
from megatron.errors import MegatronError
from megatron.scheduling.control.messages import Answer, Command
from megatron.scheduling.control.states import Code, CommandKind, Mode
from megatron.serving.api_errors import ApiError, ErrorCode
from megatron.serving.app import no_route
from megatron.serving.bodies import json_object, read_fields
from megatron.serving.guard import Guard
from megatron.serving.responses import error_response, json_response, read_body

PREFIX = "/control/"
_MAX_BODY_BYTES, _BODY_S, _MAX_DEPTH = 1 << 16, 10, 4
_GRACE_S = 30.0  # beside the time of a transition: its decision is repeated until all have it
_DEFAULT_S, _POLL_S = 60.0, 0.002

STATUS = {
    Code.OK: 200,
    Code.ACCEPTED: 200,
    Code.BAD_COMMAND: 400,
    Code.WRONG_STATE: 409,
    Code.BUSY: 409,
    Code.SUPERSEDED: 409,
    Code.REFUSED: 409,
    Code.TIMEOUT: 504,
}
UNAVAILABLE = 503  # of all other codes


class OperatorPlane(Protocol):
    """The control plane, as operators reach it."""

    @property
    def weights(self) -> int:
        """The version of the weights."""

    @property
    def missing(self) -> list[int]:
        """Ranks that do not take part."""

    def send(self, command: Command, *, wait_s: float) -> "Future[Answer]":
        """Send a command; see `ControlThread.send`."""


Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class PauseBody(msgspec.Struct, kw_only=True):
    """`POST /control/pause`; `freeze` keeps requests as they are, `drain` lets them end first."""

    mode: str = "freeze"
    timeout: Seconds | None = None


class SuspendBody(msgspec.Struct, kw_only=True):
    """`POST /control/suspend`: where keys and values are meanwhile."""

    cache: str = "keep"
    timeout: Seconds | None = None


class ResumeBody(msgspec.Struct, kw_only=True):
    """`POST /control/resume`; `cancel` ends a pause that is being made."""

    cancel: bool = False
    timeout: Seconds | None = None


class WeightsBody(msgspec.Struct, kw_only=True):
    """`POST /control/weights`: the folder of another checkpoint of the same model."""

    load: str
    timeout: Seconds | None = None


class StopBody(msgspec.Struct, kw_only=True):
    """`POST /control/stop`: `drain` lets requests end first, `now` does not."""

    mode: str = "drain"
    timeout: Seconds | None = None


class OperatorApi:
    """The handlers of these paths.

    Args:
        settled_epoch: returns the newest transition that the engine of this process has made. An
            answer is given when that is the one asked for, so that the next request finds it made.
    """

    def __init__(self, plane: OperatorPlane, settled_epoch: Callable[[], int]) -> None:
        self._plane, self._settled_epoch = plane, settled_epoch

    def routes(self) -> list[Route]:
        """Return the routes with their methods."""
        bodies: dict[str, type[msgspec.Struct]] = {
            "pause": PauseBody,
            "suspend": SuspendBody,
            "resume": ResumeBody,
            "weights": WeightsBody,
            "stop": StopBody,
        }
        posts = [
            Route(f"{PREFIX}{name}", self._handler(body), methods=["POST"])
            for name, body in bodies.items()
        ]
        return [*posts, Route(f"{PREFIX}status", self._status, methods=["GET"])]

    def _handler(self, body: type[msgspec.Struct]) -> "Callable[[Request], object]":
        async def handle(request: Request) -> Response:
            try:
                data = await read_body(request, most=_MAX_BODY_BYTES, timeout_s=_BODY_S)
                fields = json_object(data or b"{}", max_depth=_MAX_DEPTH)
                read, ignored = read_fields(body, fields)
                if ignored:
                    raise _refused("the body has a field that nothing reads", ", ".join(ignored))
                if isinstance(read, WeightsBody) and self._plane.missing:
                    raise _missing(self._plane.missing)
                return await self._ask(self._command(read))
            except ApiError as error:
                return error_response(error)

        return handle

    def _command(self, body: msgspec.Struct) -> Command:
        name, remaining_ms = new_id(), int(1000 * (getattr(body, "timeout", None) or 0))
        match body:
            case PauseBody():
                return Command(name, CommandKind.PAUSE, _mode(body.mode), remaining_ms=remaining_ms)
            case SuspendBody():
                return Command(
                    name, CommandKind.SUSPEND, _mode(body.cache), remaining_ms=remaining_ms
                )
            case WeightsBody():
                return Command(
                    name,
                    CommandKind.NEW_WEIGHTS,
                    weights=self._plane.weights + 1,
                    remaining_ms=remaining_ms,
                    source=body.load,
                )
            case StopBody():
                return Command(name, CommandKind.STOP, _mode(body.mode), remaining_ms=remaining_ms)
            case ResumeBody():
                return Command(
                    name, CommandKind.RESUME, remaining_ms=remaining_ms, cancel=body.cancel
                )
        raise AssertionError(body)  # invariant: one of the bodies above

    async def _status(self, request: Request) -> Response:
        return await self._ask(Command(new_id(), CommandKind.STATUS))

    async def _ask(self, command: Command) -> Response:
        wait_s = _GRACE_S + (command.remaining_ms / 1000 or _DEFAULT_S)
        try:
            answer = await asyncio.wrap_future(self._plane.send(command, wait_s=wait_s))
        except (ControlTimeoutError, ControlConnectionError) as error:
            return error_response(_unavailable(error))
        deadline = time.monotonic() + _GRACE_S
        is_made = answer.code is Code.OK and command.command is not CommandKind.STATUS
        while is_made and self._settled_epoch() < answer.epoch and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        return answer_of(answer)


def answer_of(answer: Answer) -> Response:
    """Return the answer of the control plane as one of HTTP."""
    body: dict[str, object] = {
        "code": str(answer.code),
        "state": answer.state,
        "epoch": answer.epoch,
        "detail": answer.detail,
        "ranks": [
            {"rank": one.member, "verdict": one.verdict, "detail": one.detail}
            for one in answer.ranks
        ],
    }
    status = STATUS.get(answer.code, UNAVAILABLE)
    if status >= 400:
        message = f"{answer.code}: the engine is {answer.state}"
        message += f"; {answer.detail}" if answer.detail else ""
        kind = "invalid_request_error" if status < 500 else "server_error"
        body["error"] = {
            "message": message,
            "type": kind,
            "param": None,
            "code": str(answer.code),
        }
    response = json_response(body)  # type: ignore[arg-type]
    response.status_code = status
    if status >= 400:  # the same command fails again until somebody does something
        response.headers["x-should-retry"] = "false"
    return response


def operator_app(
    plane: OperatorPlane,
    settled_epoch: Callable[[], int],
    *,
    keys: Collection[str],
    is_local: bool,
    has_api_keys: bool,
    max_header_bytes: int,
) -> ASGIApp:
    """Return the application of operators, behind keys of its own.

    Args:
        is_local: whether only programs of this machine can connect.
        has_api_keys: whether the server has users who may come by way of a proxy. Without keys of
            operators nothing is answered to them, nor to other machines.
    """
    if not keys and (has_api_keys or not is_local):
        return _closed
    app = Starlette(
        routes=OperatorApi(plane, settled_epoch).routes(),
        exception_handlers={HTTPException: no_route},
    )
    return Guard(app, keys=keys, max_header_bytes=max_header_bytes, is_local=is_local)


class OperatorPaths:
    """Two applications on one port: paths of operators go to theirs, with its keys."""

    def __init__(self, app: ASGIApp, operators: ASGIApp) -> None:
        self._app, self._operators = app, operators

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_theirs = scope["type"] == "http" and scope["path"].startswith(PREFIX)
        await (self._operators if is_theirs else self._app)(scope, receive, send)


async def _closed(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(
        ErrorCode.HOST,
        "operators need a key of their own here",
        fix="start the server with --control-key-file",
    )
    await error_response(error)(scope, receive, send)


def _mode(text: str) -> Mode:
    try:
        return Mode(text)
    except ValueError:
        raise _refused("there is no such mode", repr(text)) from None


def _refused(problem: str, found: str) -> ApiError:
    return ApiError(
        ErrorCode.INVALID_VALUE, problem, found=found, fix="see docs/serving.md, Operating"
    )


def _missing(ranks: list[int]) -> ApiError:
    """Return the refusal of new weights: all ranks of all replicas read a checkpoint together."""
    return ApiError(
        ErrorCode.ENGINE_UNAVAILABLE,
        "new weights need all ranks",
        found=f"without ranks {', '.join(map(str, ranks))}",
        fix="start the server again with the new weights",
    )


def _unavailable(error: MegatronError) -> ApiError:
    return ApiError(ErrorCode.ENGINE_UNAVAILABLE, error.problem, found=error.found, fix=error.fix)
