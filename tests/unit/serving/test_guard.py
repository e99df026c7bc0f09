"""Nothing is read of a request without a key, of another host, or with huge headers."""

import pytest

from megatron.serving.app import server_app
from tests.support.serving.calls import Reply, ask, backend_of
from tests.support.serving.fake_engine import FakeEngine

KEYS = ("first-secret-key", "second-secret-key")


def complete(engine: FakeEngine, authorization: str | None) -> Reply:
    app = server_app(backend_of(engine), keys=KEYS)
    headers = {} if authorization is None else {"authorization": authorization}
    return ask(app, "POST", "/v1/completions", {"prompt": "a"}, headers=headers)


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", "Bearer first-secret", "Basic first-secret-key", "Bearer \xff"],
)
def test_a_request_without_a_valid_key_is_refused(given: str | None) -> None:
    engine = FakeEngine()
    reply = complete(engine, given)
    assert (reply.status, reply.error["type"]) == (401, "authentication_error")
    assert "send the header Authorization: Bearer KEY" in reply.error["message"]
    assert reply.headers["www-authenticate"] == "Bearer"
    assert not engine.requests


def test_every_key_is_accepted_and_has_prefixes_of_its_own() -> None:
    engine = FakeEngine()
    for key in KEYS:
        assert complete(engine, f"Bearer {key}").status == 200
    salts = {request.salt for request in engine.requests}
    assert len(salts) == 2
    assert not any(key.encode() in salt for key in KEYS for salt in salts)


def test_only_the_page_and_health_need_no_key() -> None:
    app = server_app(backend_of(FakeEngine()), keys=KEYS)
    opened = {
        path: ask(app, "GET", path).status
        for path in ("/", "/health", "/metrics", "/state", "/v1/models", "/nothing", "//health")
    }
    assert opened == dict.fromkeys(opened, 401) | {"/": 200, "/health": 200}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:5000", "[::1]:80", "LOCALHOST:1"])
def test_names_of_this_machine_are_answered(host: str) -> None:
    app = server_app(backend_of(FakeEngine()))
    assert ask(app, "GET", "/health", headers={"host": host}).status == 200


@pytest.mark.parametrize("host", ["", "evil.example", "127.0.0.1.evil.example", "localhost.x"])
def test_a_page_elsewhere_cannot_use_the_server_by_a_name_of_its_own(host: str) -> None:
    backend = backend_of(FakeEngine())
    reply = ask(server_app(backend), "GET", "/v1/models", headers={"host": host})
    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")
    assert "connect to 127.0.0.1" in reply.error["message"]
    key = {"host": host, "authorization": f"Bearer {KEYS[0]}"}
    assert ask(server_app(backend, keys=KEYS), "GET", "/v1/models", headers=key).status == 200


def test_headers_that_are_too_large_are_refused() -> None:
    app = server_app(backend_of(FakeEngine(), max_header_kib=1))
    reply = ask(app, "GET", "/health", headers={"x": "y" * 1024})
    assert (reply.status, reply.error["code"]) == (431, "headers_too_large")


def test_every_answer_has_a_number_and_is_not_stored() -> None:
    app = server_app(backend_of(FakeEngine()), keys=KEYS)
    replies = [ask(app, "GET", path) for path in ("/health", "/v1/models")]
    assert len({reply.headers["x-request-id"] for reply in replies}) == 2
    for reply in replies:
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["x-content-type-options"] == "nosniff"
