"""What every request passes before anything reads it: host, key, size of headers.

Keys are compared in constant time, all of them, and never printed. Answers get a number of their
own, and headers that keep browsers from guessing, framing and storing.
"""

import hashlib
import hmac
import re
import uuid
from collections.abc import Collection, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron.serving.api_errors import ApiError, ErrorCode
from megatron.serving.responses import error_response

OPEN_PATHS = frozenset({"/", "/health"})  # the page has no secrets: a user types the key there
SALT = "megatron.salt"  # in the scope: equal for requests with the same key
REQUEST_ID = "x-request-id"
_LOOPBACK = re.compile(r"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
_HEADERS: Mapping[str, str] = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}


class Guard:
    """An ASGI application in front of another one.

    Args:
        keys: of which a client must send one; none are needed if there are none.
        is_local: whether only programs of this machine can connect. Without keys the name that they
            connect to has to be one of this machine: otherwise any page that a browser shows here
            could use the server by a name of its own that leads here.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Collection[str], max_header_bytes: int, is_local: bool
    ) -> None:
        self._app = app
        self._keys = [_digest(key.encode()) for key in keys]
        self._max_header_bytes = max_header_bytes
        self._checks_host = is_local and not self._keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity = f"req-{uuid.uuid4().hex}"

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = identity
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            scope[SALT] = self._checked(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _checked(self, scope: Scope) -> bytes:
        """Return the salt of a request that may pass; raises ApiError for others."""
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        size += len(scope["path"]) + len(scope["query_string"])
        if size > self._max_header_bytes:
            raise ApiError(
                ErrorCode.HEADER_SIZE,
                "the headers of the request are too large",
                found=f"{size} bytes",
                fix=f"send {self._max_header_bytes} bytes or fewer",
            )
        headers = Headers(scope=scope)
        if self._checks_host and not _LOOPBACK.fullmatch(headers.get("host", "")):
            raise ApiError(
                ErrorCode.HOST,
                "without API keys, the server answers to names of its own machine only",
                found=f"host {headers.get('host', '(none)')}",
                fix="connect to 127.0.0.1, or start the server with --api-key-file",
            )
        if not self._keys or scope["path"] in OPEN_PATHS:
            return b""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip().encode())
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                ErrorCode.NO_KEY,
                "the request has no valid API key",
                fix="send the header Authorization: Bearer KEY",
            )
        return digest


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
