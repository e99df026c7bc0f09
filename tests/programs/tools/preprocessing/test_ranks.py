"""Ranks exchange results, and get an error when one fails or stops sending."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import DataError, MachineError, PeerError
from megatron.launch import Launch
from tests.support.call import Call
from tests.support.launch import free_port
from tools.preprocessing import ranks as ranks_module
from tools.preprocessing.ranks import ToolRanks

WITHIN_S = 60.0


def test_one_rank_waits_for_nobody() -> None:
    with ToolRanks(Launch()) as ranks:
        assert ranks.is_first
        assert ranks.gather("a", (1, "x")) == [[1, "x"]]
        assert ranks.gather_at_first("b", 2) == [2]
        assert ranks.from_first("c", {"d": None}) == {"d": None}
        assert [ranks.take("n") for _ in range(3)] == [0, 1, 2]
        assert ranks.take("other") == 0
        ranks.check()


def _start(rank: int, size: int, port: int, body: Callable[[ToolRanks], Any]) -> Any:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    began = time.monotonic()
    try:
        with ToolRanks.join() as ranks:
            outcome = body(ranks)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    assert time.monotonic() - began < WITHIN_S
    return outcome


def on_ranks(
    folder: Path, size: int, body: Callable[[ToolRanks], Any], *, killed: bool = False
) -> list[Any]:
    """What `body` returned, or raised, on every rank that lived, in order of ranks."""
    port = free_port()
    calls = [Call(folder, f"{rank}", _start, rank, size, port, body) for rank in range(size)]
    for call in calls:
        call.process.wait(WITHIN_S)
    lived = [call for call in calls if not killed or call.outcome is not None]
    assert len(lived) == size - killed
    return [call.value(WITHIN_S) for call in lived]


def _exchange(ranks: ToolRanks) -> Any:
    everybody = ranks.gather("all", ranks.rank * 10)
    first = ranks.gather_at_first("first", [ranks.rank])
    received = ranks.from_first("told", "word" if ranks.is_first else None)
    own = []
    while (number := ranks.take("work")) < 20:
        own.append(number)
        time.sleep(0.01)
    done = ranks.gather("done", own)
    return everybody, first, received, sorted(number for taken in done for number in taken)


def test_results_reach_those_who_are_meant_and_work_is_given_once(tmp_path: Path) -> None:
    first, *others = on_ranks(tmp_path, 3, _exchange)
    assert first == ([0, 10, 20], [[0], [1], [2]], "word", list(range(20)))
    assert all(other == ([0, 10, 20], None, "word", list(range(20))) for other in others)


def _one_fails(ranks: ToolRanks) -> Any:
    if ranks.rank == 1:
        raise DataError("the file is gone", found="x.jsonl", fix="bring it back")
    if ranks.rank == 2:  # at work, not waiting
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            time.sleep(0.01)
            ranks.check()
    return ranks.gather("never", 0)


def test_a_failure_reaches_ranks_that_wait_and_ranks_that_work_with_its_words(
    tmp_path: Path,
) -> None:
    began = time.monotonic()
    first, failed, third = on_ranks(tmp_path, 3, _one_fails)
    assert failed.startswith("DataError: the file is gone")
    for other in (first, third):
        assert other.startswith("PeerError: rank 1 failed, so this rank ends too")
        assert "bring it back" in other
    assert time.monotonic() - began < 30


def _one_is_killed(ranks: ToolRanks) -> Any:
    ranks_module._SILENCE_S = 4.0
    ranks.gather("all", 0)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return ranks.gather("never", 0)


def test_a_rank_that_fell_silent_is_given_up(tmp_path: Path) -> None:
    (first,) = on_ranks(tmp_path, 2, _one_is_killed, killed=True)
    assert first.startswith("PeerError: rank 1 has sent nothing for 4 s")


def test_ranks_that_do_not_meet_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tools.preprocessing.ranks._SILENCE_S", 0.1)
    with pytest.raises(MachineError, match="the ranks could not find each other") as caught:
        ToolRanks.join()
    assert "MASTER_ADDR" in str(caught.value)


class Gone:
    """A store whose host is gone."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe\nC++ stack")


def test_a_store_that_is_gone_is_an_error() -> None:
    ranks = ToolRanks(Launch())
    ranks._store = Gone()  # type: ignore[assignment]
    with pytest.raises(PeerError, match="hosts the rendezvous store is gone") as caught:
        ranks._await("x", 0)
    assert "Broken pipe" in str(caught.value)
