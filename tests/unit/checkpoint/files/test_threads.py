"""A few threads of one rank: results in order, errors raised, no more threads than cores."""

import threading
import time

import pytest

from megatron.checkpoint.files import threads
from megatron.checkpoint.files.threads import in_threads, this_host, threads_of_this_rank

SOON_S = 30.0  # for threads that have to meet; a busy machine starts them late


@pytest.mark.parametrize("count", [1, 2, 5])
def test_results_stand_in_the_order_of_the_items(count):
    def slow_at_first(item):
        time.sleep(0.01 if item == 0 else 0)
        return item * item

    assert in_threads(slow_at_first, range(7), count) == [0, 1, 4, 9, 16, 25, 36]


def test_several_items_are_under_way_at_the_same_time():
    both = threading.Barrier(2)
    in_threads(lambda _: both.wait(SOON_S), [0, 1], 2)


def test_one_thread_or_one_item_is_the_callers_own():
    here = threading.current_thread()
    for items, count in (([1, 2, 3], 1), ([1], 4), ([], 4)):
        assert set(in_threads(lambda _: threading.current_thread(), items, count)) <= {here}


def test_the_first_item_that_fails_is_the_error_and_no_thread_is_left():
    def fail(item):
        if item > 1:
            raise ValueError(str(item))

    with pytest.raises(ValueError, match="2"):
        in_threads(fail, range(9), 3)
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint")]


@pytest.mark.parametrize(
    ("cores", "hosts", "rank", "expected"),
    [
        (1.0, ["a"], 0, 1),
        (2.0, ["a"], 0, 2),
        (2.5, ["a", "a"], 1, 1),
        (2.0, ["a"] * 4, 3, 1),
        (8.0, ["a", "b", "a"], 0, 4),
        (8.0, ["a"] * 3, 0, 2),
        (128.0, ["a"], 0, 4),
    ],
)
def test_ranks_of_a_host_share_its_cores(monkeypatch, cores, hosts, rank, expected):
    monkeypatch.setattr(threads, "usable_cpus", lambda: cores)
    assert threads_of_this_rank(hosts, rank) == expected


def test_a_host_is_told_by_its_name_and_its_boot(monkeypatch, tmp_path):
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(threads, "_BOOT_ID", boot)
    bare = this_host()
    boot.write_text("one\n")
    first = this_host()
    boot.write_text("other\n")
    assert len({bare, first, this_host()}) == 3
