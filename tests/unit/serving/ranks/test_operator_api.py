"""Operators change the state of an engine over HTTP, with their own keys, and get all verdicts."""

from concurrent.futures import Future
from typing import Any

import pytest
from starlette.types import ASGIApp

from megatron.control.client import ControlTimeoutError
from megatron.scheduling.control.messages import Answer, Command, RankAnswer
from megatron.scheduling.control.states import Code, CommandKind, Mode
from megatron.serving.ranks.operator_api import STATUS, UNAVAILABLE, OperatorPaths, operator_app
from tests.support.serving.calls import app_of, ask
from tests.support.serving.fake_engine import FakeEngine

KEY = "a-key-of-operators"


class FakePlane:
    """Answers every command alike, and notes them."""

    weights = 4
    missing: tuple[int, ...] = ()

    def __init__(self, code: Code = Code.OK) -> None:
        self.code, self.commands, self.waits = code, [], []
        self.error: Exception | None = None
        self.looks, self.settles_after = 0, 0

    def settled_epoch(self) -> int:
        self.looks += 1
        return 7 if self.looks > self.settles_after else 6

    def send(self, command: Command, *, wait_s: float) -> "Future[Answer]":
        self.commands.append(command)
        self.waits.append(wait_s)
        future: Future[Answer] = Future()
        if self.error is not None:
            future.set_exception(self.error)
            return future
        ranks = (RankAnswer(0, "ack"), RankAnswer(1, "silent", "nothing in 5 s"))
        future.set_result(Answer(command.id, self.code, "paused", 7, "rank 1: silent", ranks))
        return future


def app_with(
    plane: FakePlane,
    keys: tuple[str, ...] = (),
    is_local: bool = True,
    has_api_keys: bool = False,
) -> ASGIApp:
    return operator_app(
        plane,
        plane.settled_epoch,
        keys=keys,
        is_local=is_local,
        has_api_keys=has_api_keys,
        max_header_bytes=4096,
    )


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("pause", {}, (CommandKind.PAUSE, Mode.FREEZE)),
        ("pause", {"mode": "drain"}, (CommandKind.PAUSE, Mode.DRAIN)),
        ("suspend", {"cache": "drop"}, (CommandKind.SUSPEND, Mode.DROP)),
        ("resume", {}, (CommandKind.RESUME, Mode.DEFAULT)),
        ("weights", {"load": "folder"}, (CommandKind.NEW_WEIGHTS, Mode.DEFAULT)),
        ("stop", {"mode": "now"}, (CommandKind.STOP, Mode.NOW)),
    ],
)
def test_a_path_is_a_command(path: str, body: Any, expected: tuple[CommandKind, Mode]) -> None:
    plane = FakePlane()
    reply = ask(app_with(plane), "POST", f"/control/{path}", body | {"timeout": 2.5})
    assert reply.status == 200
    assert reply.json == {
        "code": "ok",
        "state": "paused",
        "epoch": 7,
        "detail": "rank 1: silent",
        "ranks": [
            {"rank": 0, "verdict": "ack", "detail": ""},
            {"rank": 1, "verdict": "silent", "detail": "nothing in 5 s"},
        ],
    }
    (command,) = plane.commands
    assert (command.command, command.mode) == expected
    assert command.remaining_ms == 2500
    assert plane.waits[0] > 2.5
    if path == "weights":
        assert (command.weights, command.source) == (5, "folder")


def test_a_pause_may_be_cancelled_and_the_state_be_read() -> None:
    plane = FakePlane()
    ask(app_with(plane), "POST", "/control/resume", {"cancel": True})
    ask(app_with(plane), "GET", "/control/status")
    assert [(each.command, each.cancel) for each in plane.commands] == [
        (CommandKind.RESUME, True),
        (CommandKind.STATUS, False),
    ]


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_a_status_and_no_failure_is_to_be_repeated(code: Code) -> None:
    reply = ask(app_with(FakePlane(code)), "POST", "/control/pause", {})
    assert reply.status == STATUS.get(code, UNAVAILABLE)
    is_failure = reply.status >= 400
    assert reply.headers.get("x-should-retry") == ("false" if is_failure else None)
    assert (reply.json.get("error", {}).get("code") == code) == is_failure
    if is_failure:
        assert reply.error["message"] == f"{code}: the engine is paused; rank 1: silent"
    assert reply.json["ranks"][1]["verdict"] == "silent"


def test_an_answer_comes_when_the_engine_has_made_the_transition() -> None:
    plane = FakePlane()
    plane.settles_after = 3
    assert ask(app_with(plane), "POST", "/control/pause", {}).status == 200
    assert plane.looks == 4
    plane = FakePlane(Code.REFUSED)
    ask(app_with(plane), "POST", "/control/pause", {})
    assert plane.looks == 0


def test_wrong_states_and_transitions_in_progress_are_conflicts() -> None:
    assert {STATUS[code] for code in (Code.WRONG_STATE, Code.BUSY, Code.REFUSED)} == {409}


@pytest.mark.parametrize(
    ("path", "body", "found"),
    [
        ("pause", {"mode": "sleep"}, "there is no such mode"),
        ("pause", {"modus": "drain"}, "the body has a field that nothing reads"),
        ("pause", {"timeout": -1}, "timeout"),
        ("weights", {}, "load"),
        ("stop", b"[", "JSON"),
    ],
)
def test_a_wrong_body_is_refused_before_a_command_is_sent(path: str, body: Any, found: str) -> None:
    plane = FakePlane()
    reply = ask(app_with(plane), "POST", f"/control/{path}", body)
    assert reply.status == 400
    assert found in reply.error["message"]
    assert plane.commands == []


def test_new_weights_are_refused_while_ranks_are_missing() -> None:
    plane = FakePlane()
    plane.missing = (2, 3)
    reply = ask(app_with(plane), "POST", "/control/weights", {"load": "folder"})
    assert (reply.status, plane.commands) == (503, [])
    assert "without ranks 2, 3" in reply.error["message"]
    assert ask(app_with(plane), "POST", "/control/pause", {}).status == 200


def test_a_coordinator_that_does_not_answer_is_an_error_in_time() -> None:
    plane = FakePlane()
    plane.error = ControlTimeoutError("no answer", found="nothing in 90 s", fix="ask again")
    reply = ask(app_with(plane), "POST", "/control/pause", {})
    assert (reply.status, reply.error["code"]) == (503, "engine_unavailable")


def test_operators_need_their_own_key_and_none_only_on_this_machine() -> None:
    plane = FakePlane()
    with_key = app_with(plane, (KEY,))
    assert ask(with_key, "POST", "/control/pause", {}).status == 401
    wrong = {"authorization": "Bearer another-key-of-length"}
    assert ask(with_key, "GET", "/control/status", headers=wrong).status == 401
    right = {"authorization": f"Bearer {KEY}"}
    assert ask(with_key, "POST", "/control/pause", {}, headers=right).status == 200
    elsewhere = {"host": "rebound.example"}
    assert ask(app_with(plane), "POST", "/control/pause", {}, headers=elsewhere).status == 403
    reply = ask(app_with(plane, is_local=False), "POST", "/control/pause", {})
    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")
    assert "--control-key-file" in reply.error["message"]
    behind_proxy = app_with(plane, has_api_keys=True)
    assert ask(behind_proxy, "POST", "/control/stop", {}).status == 403
    both = app_with(plane, (KEY,), is_local=False, has_api_keys=True)
    assert ask(both, "GET", "/control/status", headers=right).status == 200
    assert len(plane.commands) == 2


def test_paths_of_operators_go_to_them_and_all_others_to_the_server() -> None:
    plane = FakePlane()
    both = OperatorPaths(app_of(FakeEngine()), app_with(plane))
    assert ask(both, "GET", "/health").json["status"] == "running"
    assert ask(both, "GET", "/control/status").json["code"] == "ok"
    unknown = ask(both, "POST", "/control/reboot", {})
    assert (unknown.status, unknown.error["code"]) == (404, "not_found")
    assert ask(both, "GET", "/control/pause").status == 405
