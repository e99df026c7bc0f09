"""Errors have the form that the official client reads, and no line of a client breaks a log."""

import pytest

from megatron.errors import DataError
from megatron.serving.api_errors import ApiError, ErrorCode, refused_by


def test_the_body_is_that_of_openai_and_of_megatron() -> None:
    error = ApiError(ErrorCode.INVALID_VALUE, "n is wrong", found=9, fix="use 8", param="n")
    message = "n is wrong; found: 9; fix: use 8"
    assert error.body == {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        },
        "message": message,
    }
    assert (error.status, error.headers) == (400, {})


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_has_a_status(code: ErrorCode) -> None:
    assert 400 <= ApiError(code, "a", fix="b").status < 600


def test_a_client_learns_when_to_repeat_a_request() -> None:
    later = ApiError(ErrorCode.QUEUE_FULL, "a", fix="b", retry_after_s=3)
    assert later.headers == {"retry-after": "3"}
    assert ApiError(ErrorCode.DEADLINE, "a", fix="b").headers == {"x-should-retry": "false"}
    assert ApiError(ErrorCode.NO_KEY, "a", fix="b").headers == {"www-authenticate": "Bearer"}


def test_what_a_client_sent_is_shown_in_one_short_line() -> None:
    error = ApiError(ErrorCode.INVALID_VALUE, "a", found="\n\x1b[31m" + "x" * 999, fix="b")
    assert "\n" not in error.message
    assert "\x1b" not in error.message
    assert len(error.message) < 400


def test_an_error_of_a_tokenizer_becomes_an_answer() -> None:
    error = refused_by(DataError("no piece", found="U+1", fix="clean it"), param="prompt")
    assert (error.status, error.param) == (400, "prompt")
    assert error.message == "no piece; found: U+1; fix: clean it"
