"""Errors that a client gets: a status, and a body as OpenAI's interface has it.

Every error is the fault of one request, or a state of the server. The official client raises the
class that belongs to the status, and repeats a request after 408, 409, 429 and 5xx by itself.
"""

from collections.abc import Mapping
from enum import StrEnum

from megatron.errors import MegatronError
from megatron.json_values import JsonValue


class ErrorCode(StrEnum):
    """What is wrong; `_KINDS` has the status and OpenAI's type of each."""

    INVALID_JSON = "invalid_json"
    INVALID_VALUE = "invalid_value"
    UNKNOWN_FIELD = "unknown_parameter"
    UNSUPPORTED = "unsupported_parameter"
    CONTEXT_LENGTH = "context_length_exceeded"
    NO_KEY = "invalid_api_key"
    HOST = "host_not_allowed"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    METHOD = "method_not_allowed"
    SLOW_BODY = "request_timeout"
    BODY_SIZE = "body_too_large"
    MEDIA_TYPE = "unsupported_media_type"
    HEADER_SIZE = "headers_too_large"
    QUEUE_FULL = "queue_full"
    INTERNAL = "internal"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    DRAINING = "server_stopping"
    DEADLINE = "deadline_exceeded"


_KINDS: dict[ErrorCode, tuple[int, str]] = {
    ErrorCode.INVALID_JSON: (400, "invalid_request_error"),
    ErrorCode.INVALID_VALUE: (400, "invalid_request_error"),
    ErrorCode.UNKNOWN_FIELD: (400, "invalid_request_error"),
    ErrorCode.UNSUPPORTED: (400, "invalid_request_error"),
    ErrorCode.CONTEXT_LENGTH: (400, "invalid_request_error"),
    ErrorCode.NO_KEY: (401, "authentication_error"),
    ErrorCode.HOST: (403, "permission_error"),
    ErrorCode.MODEL_NOT_FOUND: (404, "not_found_error"),
    ErrorCode.NOT_FOUND: (404, "not_found_error"),
    ErrorCode.METHOD: (405, "invalid_request_error"),
    ErrorCode.SLOW_BODY: (408, "invalid_request_error"),
    ErrorCode.BODY_SIZE: (413, "invalid_request_error"),
    ErrorCode.MEDIA_TYPE: (415, "invalid_request_error"),
    ErrorCode.HEADER_SIZE: (431, "invalid_request_error"),
    ErrorCode.QUEUE_FULL: (429, "rate_limit_error"),
    ErrorCode.INTERNAL: (500, "server_error"),
    ErrorCode.ENGINE_UNAVAILABLE: (503, "server_error"),
    ErrorCode.DRAINING: (503, "server_error"),
    ErrorCode.DEADLINE: (504, "server_error"),
}
# The same request fails again: clients that repeat by themselves are told not to.
_NOT_REPEATED = frozenset({ErrorCode.INTERNAL, ErrorCode.DEADLINE})
_MOST_SHOWN = 300  # characters of what a client sent, in a message


class ApiError(MegatronError):
    """A request that is not answered as asked.

    Attributes:
        code: what is wrong.
        param: the field of the body that is at fault.
        retry_after_s: seconds after which the same request may be sent again.
    """

    def __init__(
        self,
        code: ErrorCode,
        problem: str,
        *,
        found: object = None,
        fix: str,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        self.code, self.param, self.retry_after_s = code, param, retry_after_s
        super().__init__(problem, found=found, fix=fix)

    @property
    def status(self) -> int:
        """The status of HTTP."""
        return _KINDS[self.code][0]

    @property
    def message(self) -> str:
        """Problem, found and fix in one line, without control characters."""
        parts = [self.problem]
        if self.found is not None:
            parts.append(f"found: {str(self.found)[:_MOST_SHOWN]}")
        text = "; ".join([*parts, f"fix: {self.fix}"])
        return "".join(char if char.isprintable() else " " for char in text)

    @property
    def body(self) -> dict[str, JsonValue]:
        """OpenAI's body; clients of Megatron look for `message` outside of `error`."""
        error = {
            "message": self.message,
            "type": _KINDS[self.code][1],
            "param": self.param,
            "code": str(self.code),
        }
        return {"error": error, "message": self.message}

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that tell a client whether and when the request is worth repeating."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.code in _NOT_REPEATED:
            headers["x-should-retry"] = "false"
        if self.code is ErrorCode.NO_KEY:
            headers["www-authenticate"] = "Bearer"
        return headers


def refused_by(error: MegatronError, *, param: str | None = None) -> ApiError:
    """Return the answer to a request that a tokenizer, a template or an engine refuses."""
    return ApiError(
        ErrorCode.INVALID_VALUE, error.problem, found=error.found, fix=error.fix, param=param
    )


def invalid_value(param: str, found: object, fix: str) -> ApiError:
    """Return the error of a field whose value cannot be used."""
    return ApiError(
        ErrorCode.INVALID_VALUE, f"{param} has a wrong value", found=found, fix=fix, param=param
    )
