"""Tests of the test support itself: results, first failure, deaths, time limits."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_on_ranks


def sum_of_ranks(offset: torch.Tensor) -> torch.Tensor:
    total = offset + dist.get_rank()
    dist.all_reduce(total)
    assert torch.get_num_threads() == 1
    return total


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("boom")
    dist.barrier()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def sleep_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def give_back_what_cannot_be_pickled() -> object:
    return lambda: None


def test_results_come_back_in_rank_order() -> None:
    results = run_on_ranks(3, sum_of_ranks, torch.ones(2))
    assert [result.tolist() for result in results] == [[6.0, 6.0]] * 3


def test_the_first_failure_is_reported_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed first:(.|\n)*ValueError: boom"):
        run_on_ranks(2, fail_on_rank_1)


def test_a_dead_rank_is_reported() -> None:
    with pytest.raises(AssertionError, match="rank 1 of 2 died with exit code 3"):
        run_on_ranks(2, die_on_rank_1)


def test_a_rank_that_does_not_return_is_reported() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"ranks \[1\] gave no result within 2 s"):
        run_on_ranks(2, sleep_on_rank_1, timeout_s=2)
    assert time.monotonic() - start < 20


def test_a_result_that_cannot_be_pickled_is_reported() -> None:
    with pytest.raises(AssertionError, match=r"failed first(.|\n)*pickle"):
        run_on_ranks(1, give_back_what_cannot_be_pickled)
