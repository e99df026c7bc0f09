"""Tests of the failure watch in one process; the ending of others is a distributed test."""

import threading
import time

import pytest
import torch.distributed as dist

from megatron.errors import MegatronError
from megatron.peers import native_stacks
from megatron.peers.activity import STEP, Activity
from megatron.peers.records import Beat
from megatron.peers.stacks import ProcessName
from megatron.peers.stall import StallLimits
from megatron.peers.watch import PeerWatch
from tests.support.deadlines import HANG_S

GRACE_S = 1.0  # more than the half a second in which a watch looks


@pytest.fixture
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for others, as closing does, without others."""
    monkeypatch.setattr("megatron.peers.watch._LINGER_S", 0.2)


@pytest.mark.usefixtures("_brief")
def test_the_first_announcement_is_the_one_that_counts() -> None:
    store = dist.HashStore()
    watch = PeerWatch(store, rank=1, world_size=2)
    watch.announce("disk full")
    watch.announce("a consequence")
    assert b"disk full" in store.get("megatron/first_failure")
    assert watch._look() is None  # its own failure does not end it
    watch.close()


@pytest.mark.usefixtures("_brief")
def test_another_ranks_failure_is_named() -> None:
    store = dist.HashStore()
    watch, other = (PeerWatch(store, rank=rank, world_size=2) for rank in (0, 1))
    other.announce("disk full")
    error = watch._look()
    assert error is not None
    assert "rank 1 failed" in error.problem
    assert "disk full" in str(error.found)
    watch.close()  # first: both are in this process, which it would end
    other.close()


@pytest.mark.usefixtures("_brief")
@pytest.mark.parametrize("rank", [0, 1])
def test_closing_waits_for_the_others_but_not_forever(rank: int) -> None:
    watch = PeerWatch(dist.HashStore(), rank=rank, world_size=2)
    if rank:
        watch.announce("so that the others hear of it before a launcher kills them")
    start = time.monotonic()
    watch.close()
    assert 0.2 <= time.monotonic() - start < 5
    watch.close()


@pytest.mark.usefixtures("_brief")
def test_a_rank_notes_that_its_python_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = threading.Event()
    monkeypatch.setattr(native_stacks, "note_python_runs", noted.set)
    limits = StallLimits(named_s=60, silent_s=None, still_s=None, start_s=60)
    watch = PeerWatch(dist.HashStore(), 0, 1, activity=Activity(), limits=limits)
    assert noted.wait(HANG_S)
    watch.close()


def beside_a_rank_that_has_ended(
    monkeypatch: pytest.MonkeyPatch, *, is_told: bool
) -> tuple[list[str], list[str]]:
    """Return what is told, and then why the process ends, of a watch whose neighbour is gone."""
    told, ended, over = list[str](), list[str](), threading.Event()

    def end(error: MegatronError, store: object) -> None:
        ended.append(error.problem)
        over.set()

    monkeypatch.setattr("megatron.peers.watch._end_process", end)
    gone = ProcessName.own()._replace(pid=2**22 + 1)  # beyond the largest pid
    store = dist.HashStore()
    limits = StallLimits(named_s=60, silent_s=60, still_s=None, start_s=60)
    watch = PeerWatch(store, 0, 2, activity=Activity(), limits=limits)

    def take(error: MegatronError) -> None:
        told.append(error.problem)
        if ended:
            told.append("too late")

    if is_told:
        watch.tell(take)
    store.set("megatron/beat/1", Beat(1, STEP, 12, 60.0, gone).encode())
    assert over.wait(HANG_S)
    watch.close()
    return told, ended


@pytest.mark.usefixtures("_brief")
@pytest.mark.parametrize("is_told", [False, True])
def test_the_stop_of_a_rank_is_told_before_the_process_ends(
    monkeypatch: pytest.MonkeyPatch, *, is_told: bool
) -> None:
    monkeypatch.setattr("megatron.peers.watch._GRACE_S", GRACE_S)
    began = time.monotonic()
    told, ended = beside_a_rank_that_has_ended(monkeypatch, is_told=is_told)
    assert ended[0] == "rank 1 has stopped, so the run ends"
    assert told[:1] == ended[:1] * is_told
    assert "too late" not in told[:2]
    if is_told:
        assert time.monotonic() - began > GRACE_S, "whoever is told has time to end by itself"


@pytest.mark.parametrize(
    ("message", "found"),
    [("Connection reset by peer\nframes", "Connection reset by peer"), ("", "DistNetworkError")],
)
def test_a_lost_store_is_named(message: str, found: str) -> None:
    class Lost:
        def clone(self) -> "Lost":
            return self

        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError(message)

        def compare_set(self, *_: str) -> str:
            raise dist.DistNetworkError("Broken pipe")

        def add(self, *_: object) -> int:
            raise dist.DistNetworkError("Broken pipe")

    watch = PeerWatch(Lost(), rank=1, world_size=2)
    watch.announce("nobody is there to hear this")
    error = watch._look()
    assert error is not None
    assert "hosts the rendezvous store is gone" in error.problem
    assert error.found == found
    watch.close()


@pytest.mark.usefixtures("_brief")
def test_nonsense_in_the_store_ends_the_run_as_a_failure_does() -> None:
    store = dist.HashStore()
    watch = PeerWatch(store, rank=0, world_size=2)
    store.set("megatron/first_failure", "\x00\x1b[2J nonsense")
    error = watch._look()
    watch.close()
    assert error is not None
    assert error.problem == "another rank failed, so this rank ends too"
    assert "its record cannot be read: JSONDecodeError" in str(error.found)
