"""The comparison itself, between threads that share a store: the error of each rank, and when."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore, Store

from megatron.errors import CollectiveError, MegatronError, PeerError
from megatron.mpu.collective_checks import Call, CollectiveChecks, MessageRecord, caller

SOON_S = 0.3
Work = Callable[[CollectiveChecks], None]


def outcomes(works: Sequence[Work], store: Store | None = None, seconds: float = 20) -> list[str]:
    """Return the text of every rank's error, or nothing; each rank is a thread."""
    shared = store or HashStore()

    def run(rank: int) -> str:
        checks = CollectiveChecks(shared, rank, seconds=seconds)
        try:
            works[rank](checks)
        except MegatronError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with ThreadPoolExecutor(len(works)) as threads:
        return list(threads.map(run, range(len(works))))


def reduce(*shape: int, dtype: torch.dtype = torch.float32, ranks: int = 3) -> Work:
    tensor = torch.zeros(shape, dtype=dtype)
    return lambda checks: checks.collective("all_reduce(sum)", tensor, range(ranks))


def test_equal_calls_pass_as_often_as_they_are_made() -> None:
    def work(checks: CollectiveChecks) -> None:
        for size in range(5):
            checks.collective("all_gather", torch.zeros(size), (0, 1, 2))
            checks.collective("barrier", None, (0, 1, 2))

    assert outcomes([work] * 3) == ["", "", ""]


def test_the_rank_that_differs_is_named_to_everybody_with_what_each_wanted() -> None:
    first, *others = outcomes([reduce(4), reduce(4, 1), reduce(4)])
    assert others == [first, first]
    here = Path(__file__).name
    assert first.startswith("CollectiveError: ranks that communicate do not do the same")
    assert "call 1 of the group of ranks 0 1 2: rank 1 differs" in first
    assert "rank 0: all_reduce(sum) of [4] float32 at " in first
    assert "rank 1: all_reduce(sum) of [4, 1] float32 at " in first
    assert first.count(here) == 3


def test_of_two_ranks_neither_is_right() -> None:
    found = outcomes([reduce(2, ranks=2), reduce(2, dtype=torch.int64, ranks=2)])
    assert all("ranks 0, 1 differ\n" in text for text in found)
    assert all("of [2] int64" in text for text in found)


def test_a_missing_rank_is_named_with_its_last_call() -> None:
    def leaves(checks: CollectiveChecks) -> None:
        reduce(4)(checks)

    def stays(checks: CollectiveChecks) -> None:
        reduce(4)(checks)
        checks.collective("barrier", None, (0, 1, 2))

    left, *stayed = outcomes([leaves, stays, stays], seconds=SOON_S)
    assert left == ""
    for text in stayed:
        assert "a rank has not come to a call that others wait in" in text
        assert "call 2 of the group of ranks 0 1 2, barrier at " in text
        assert "rank 0, whose last call was all_reduce(sum) of [4] float32 at " in text
        assert "raise --check-collectives-seconds" in text


def test_a_rank_that_never_called_anything_is_named_too() -> None:
    found = outcomes([reduce(1, ranks=2), lambda checks: None], seconds=SOON_S)
    assert "rank 1, whose last call was none yet" in found[0]


def test_a_rank_that_is_late_but_in_time_is_waited_for() -> None:
    def late(checks: CollectiveChecks) -> None:
        time.sleep(SOON_S)
        reduce(4)(checks)

    assert outcomes([reduce(4), late, reduce(4)]) == ["", "", ""]


def test_a_rank_that_comes_too_late_does_not_go_on_alone() -> None:
    def late(checks: CollectiveChecks) -> None:
        time.sleep(4 * SOON_S)
        reduce(4, ranks=2)(checks)

    found = outcomes([reduce(4, ranks=2), late], seconds=SOON_S)
    assert "a rank has not come to a call that others wait in" in found[0]
    assert "this rank came to a call after others had given up waiting for it" in found[1]


def test_messages_meet_in_the_order_of_the_batches() -> None:
    a, b = torch.zeros(3), torch.zeros(2, 2)

    def first(checks: CollectiveChecks) -> None:  # one batch here are two there
        checks.messages(
            [MessageRecord(True, 1, a), MessageRecord(False, 1, b), MessageRecord(True, 1, b)]
        )

    def second(checks: CollectiveChecks) -> None:
        checks.messages([MessageRecord(False, 0, a), MessageRecord(True, 0, b)])
        checks.messages([MessageRecord(False, 0, b)])

    assert outcomes([first, second]) == ["", ""]


def test_both_ends_of_a_message_are_told_that_they_differ() -> None:
    found = outcomes(
        [
            lambda checks: checks.messages([MessageRecord(True, 1, torch.zeros(3))]),
            lambda checks: checks.messages([MessageRecord(False, 0, torch.zeros(4))]),
        ]
    )
    assert found[0] == found[1]
    assert "call 1 of the messages from rank 0 to 1: ranks 0, 1 differ" in found[0]
    assert "rank 0: message of [3] float32" in found[0]
    assert "rank 1: message of [4] float32" in found[0]


def test_contexts_of_one_job_count_on_their_own() -> None:
    store = HashStore()
    assert outcomes([reduce(4, ranks=2)] * 2, store) == ["", ""]
    assert outcomes([reduce(5, ranks=2)] * 2, store) == ["", ""]


def test_calls_that_are_done_are_forgotten() -> None:
    store = HashStore()

    def work(checks: CollectiveChecks) -> None:
        for _ in range(50):
            reduce(4, ranks=2)(checks)

    assert outcomes([work, work], store) == ["", ""]
    assert store.num_keys() < 12


class Gone:
    """A store whose host has ended."""

    def clone(self) -> "Gone":
        return self

    def set_timeout(self, timeout: timedelta) -> None: ...

    def add(self, key: str, amount: int) -> int:
        return 1

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Connection reset by peer\nmore")


def test_a_store_that_is_gone_is_said_so() -> None:
    checks = CollectiveChecks(Gone(), 0, seconds=1)  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="hosts the rendezvous store is gone") as raised:
        reduce(4)(checks)
    assert raised.value.found == "Connection reset by peer"


def test_a_store_that_goes_while_ranks_compare_is_said_so() -> None:
    checks = CollectiveChecks(HashStore(), 0, seconds=1)

    class Going(Gone):
        def set(self, key: str, value: str) -> None: ...

        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Broken pipe")

    checks._store = Going()  # type: ignore[assignment]
    with pytest.raises(PeerError, match="hosts the rendezvous store is gone"):
        reduce(4)(checks)


def test_a_place_is_the_line_outside_of_our_collectives() -> None:
    assert caller().startswith(__file__)
    call = Call.of("barrier", None)
    assert str(call) == f"barrier at {call.where}"
    assert call.where.startswith(__file__)


def test_the_error_survives_the_way_between_processes() -> None:
    error = CollectiveError("problem", found="found", fix="fix")
    kind, arguments = error.__reduce__()
    assert str(kind(*arguments)) == str(error)  # type: ignore[operator]
