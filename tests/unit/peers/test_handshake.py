"""Tests of megatron.peers.handshake: ranks are threads here, which share a store."""

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.errors import ConfigError, MachineError, MegatronError
from megatron.launch import free_port
from megatron.peers import handshake
from megatron.peers.handshake import Member, _member, meet, rendezvous_store
from megatron.peers.stacks import ProcessName
from tests.support.deadlines import HANG_S
from tests.support.examples import examples

SOON_S = 10.0  # for what is wrong to be said
FACTS = {"flags": "abc", "torch": "2.13"}


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_READ_S", 0.2)
    monkeypatch.setattr(handshake, "_PROBE_S", 0.1)
    monkeypatch.setattr(handshake, "_SILENT_S", 0.3)


def member(rank: int, *, world_size: int = 3, pid: int = 100, **facts: str) -> Member:
    return Member(rank, world_size, ProcessName("here 1 2", pid + rank, 5), FACTS | facts)


def met(
    members: Sequence[Member], *, within_s: float = HANG_S, store: dist.HashStore | None = None
) -> list[MegatronError | None]:
    """What each of these ranks got from the meeting, which they come to in this order."""
    shared = store or dist.HashStore()
    outcomes: list[MegatronError | None] = [None] * len(members)

    def come(place: int, own: Member) -> None:
        try:
            meet(shared, own, within_s)
        except MegatronError as error:
            outcomes[place] = error

    threads = []
    for place, own in enumerate(members):
        threads.append(threading.Thread(target=come, args=(place, own)))
        threads[-1].start()
        deadline = time.monotonic() + HANG_S
        while shared.add(handshake._COUNT, 0) <= place and time.monotonic() < deadline:
            time.sleep(0.001)
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    return outcomes


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_ranks_that_belong_together_meet(order: Sequence[int]) -> None:
    assert met([member(rank) for rank in order]) == [None, None, None]


def test_ranks_that_do_not_come_are_named_to_all_that_did() -> None:
    outcomes = met([member(0), member(2)], within_s=0.2)
    for error in outcomes:
        assert isinstance(error, MachineError)
        assert error.problem == "ranks are missing at the start"
        assert str(error.found).startswith("rank 1 of 3 did not come within 0 s; rank 0 (process")
        assert "rank 2 (process 102 on here)" in str(error.found)


def test_two_processes_of_one_rank_are_told_where_they_are() -> None:
    outcomes = met([member(0), member(1), member(1, pid=500)])
    for error in outcomes:
        assert isinstance(error, ConfigError)
        assert error.found == "rank 1 (process 101 on here) and rank 1 (process 501 on here)"


def test_a_process_that_comes_after_the_meeting_is_told_who_has_its_rank() -> None:
    store = dist.HashStore()
    assert met([member(rank) for rank in range(3)], store=store) == [None] * 3
    with pytest.raises(ConfigError, match="two processes were started as one rank") as caught:
        meet(store, member(1, pid=500), HANG_S)
    assert caught.value.found == "rank 1 (process 101 on here) and rank 1 (process 501 on here)"
    with pytest.raises(ConfigError, match="a rank of another job"):
        meet(store, member(7, world_size=8), HANG_S)


@pytest.mark.parametrize("stranger", [member(1, world_size=8), member(7)])
def test_a_rank_of_another_job_is_told_from_ours(stranger: Member) -> None:
    outcomes = met([member(0), stranger])
    for error in outcomes:
        assert isinstance(error, ConfigError)
        assert error.problem == "a rank of another job came to this rendezvous"
        assert str(stranger) in str(error.found)


def test_ranks_that_were_told_something_else_are_named_with_it() -> None:
    outcomes = met([member(0), member(1, flags="other"), member(2)])
    for error in outcomes:
        assert isinstance(error, ConfigError)
        assert error.found == "flags: abc on rank 0, 2, other on rank 1"


def test_a_rank_0_that_does_not_come_is_missed() -> None:
    (error,) = met([member(1)], within_s=0.1)
    assert isinstance(error, MachineError)
    assert error.problem == "rank 0 did not come to the start, or stopped there"


def test_nonsense_in_the_store_is_no_rank() -> None:
    store = dist.HashStore()
    store.set(f"megatron/meeting/{store.add(handshake._COUNT, 1)}", "GET / HTTP/1.1")
    outcomes: list[MegatronError] = []
    try:
        meet(store, member(0), HANG_S)
    except MegatronError as error:
        outcomes.append(error)
    assert "wrote to the rendezvous" in outcomes[0].problem


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(JSON.map(json.dumps).map(str.encode) | st.binary(max_size=50))
@example(b"[0, Infinity, null, null]")
@example(b"[" * 100_000)
@examples(100)
def test_no_record_is_a_crash(text: bytes) -> None:
    found = _member(text)
    assert found is None or isinstance(found, Member)


@contextmanager
def listener(answer: bytes | None) -> Iterator[tuple[str, int]]:
    """Something that accepts connections and says `answer`, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        ending = threading.Event()
        held: list[socket.socket] = []

        def serve() -> None:
            while not ending.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                held.append(connection)
                if answer is not None:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()
        finally:
            ending.set()
            thread.join()
            for connection in held:
                connection.close()


def test_a_host_and_its_clients_share_a_store_without_waiting_for_others() -> None:
    address = ("127.0.0.1", free_port())
    host = rendezvous_store(address, is_host=True, within_s=HANG_S)
    client = rendezvous_store(address, is_host=False, within_s=HANG_S)
    host.set("key", "value")
    assert client.get("key") == b"value"


def test_a_socket_that_says_nothing_is_found_out_long_before_the_deadline() -> None:
    began = time.monotonic()
    with listener(None) as address, pytest.raises(MachineError, match="find each other") as caught:
        rendezvous_store(address, is_host=False, within_s=600)
    assert time.monotonic() - began < SOON_S
    assert "accepts connections there and does not answer as a rendezvous" in str(caught.value)
    assert f"127.0.0.1:{address[1]}" in str(caught.value)


def test_a_socket_that_speaks_nonsense_is_no_store() -> None:
    with (
        listener(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10) as address,
        pytest.raises(MachineError, match="find each other"),
    ):
        rendezvous_store(address, is_host=False, within_s=1.0)


def test_where_nobody_listens_the_deadline_holds() -> None:
    began = time.monotonic()
    with pytest.raises(MachineError, match="find each other") as caught:
        rendezvous_store(("127.0.0.1", free_port()), is_host=False, within_s=0.5)
    assert time.monotonic() - began < SOON_S
    assert "choose another MASTER_PORT" in caught.value.fix


def test_a_port_in_use_is_named_at_once() -> None:
    with listener(None) as address, pytest.raises(MachineError, match="is in use") as caught:
        rendezvous_store(address, is_host=True, within_s=600)
    assert caught.value.found == f"127.0.0.1:{address[1]}"
