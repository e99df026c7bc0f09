"""What exceeds the resources of a node is reported with every number."""

import pytest

from megatron import log
from megatron.data.loading import worker_budget
from megatron.data.loading.worker_budget import (
    WorkerLoad,
    announce_worker_budget,
    worker_problems,
)

LOAD = WorkerLoad(num_workers=2, loaders=3, readers=4, batch_bytes=2**20)


def test_too_many_workers_are_said_with_every_number() -> None:
    assert list(worker_problems(LOAD, cpus=8, shared_bytes=None)) == []
    (problem,) = worker_problems(LOAD, cpus=7.5, shared_bytes=2**40)
    for word in ("--num-workers 2", "4 reading ranks", "8 worker", "3 loaders", "7.5 CPUs"):
        assert word in problem
    assert problem.endswith("use --num-workers 1")


def test_batches_that_do_not_fit_into_shared_memory_are_said() -> None:
    assert LOAD.bytes_in_flight == 2 * 3 * 4 * 2 * 2**20
    assert list(worker_problems(LOAD, cpus=64, shared_bytes=48 * 2**20)) == []
    (problem,) = worker_problems(LOAD, cpus=64, shared_bytes=48 * 2**20 - 1)
    assert "up to 48.0 MiB" in problem
    assert "--shm-size" in problem


def test_without_workers_nothing_is_too_much() -> None:
    alone = WorkerLoad(num_workers=0, loaders=9, readers=9, batch_bytes=2**40)
    assert list(worker_problems(alone, cpus=0.1, shared_bytes=0)) == []


def test_a_warning_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log._OUTPUT, "warned", set())
    monkeypatch.setattr(worker_budget, "usable_cpus", lambda: 1.0)
    for _ in range(2):
        announce_worker_budget(LOAD)
    assert capsys.readouterr().err.count("1 CPUs may be used here") == 1
