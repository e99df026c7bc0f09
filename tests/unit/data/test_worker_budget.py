"""Quotas are read from folders as kernels lay them out, and numbers are named in warnings."""

from pathlib import Path

import pytest

from megatron import log
from megatron.data import worker_budget
from megatron.data.worker_budget import (
    WorkerLoad,
    announce_worker_budget,
    cgroup_cpus,
    shared_memory_bytes,
    usable_cpus,
    worker_problems,
)

LOAD = WorkerLoad(num_workers=2, loaders=3, readers=4, batch_bytes=2**20)


def tree(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder / "cgroup", folder / "membership"


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, None),
        ({"membership": "0::/job\n", "cgroup/job/cpu.max": "150000 100000\n"}, 1.5),
        ({"membership": "0::/job\n", "cgroup/job/cpu.max": "max 100000\n"}, None),
        (
            {
                "membership": "0::/slice/job\n",
                "cgroup/slice/job/cpu.max": "max 100000\n",
                "cgroup/slice/cpu.max": "400000 100000\n",
                "cgroup/cpu.max": "800000 100000\n",
            },
            4.0,
        ),
        # In a container: the path is that of the host, and only the mount is there.
        ({"membership": "0::/../../host/path\n", "cgroup/cpu.max": "200000 100000"}, 2.0),
        ({"membership": "0::/\n", "cgroup/cpu.max": "200000 100000"}, 2.0),
        (
            {
                "membership": "5:cpuset:/a\n4:cpu,cpuacct:/docker/x\n",
                "cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "50000\n",
                "cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "membership": "4:cpu,cpuacct:/docker/x\n",
                "cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "membership": "4:cpu:/x\n",
                "cgroup/cpu/x/cpu.cfs_quota_us": "-1\n",
                "cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        (
            {
                "membership": "1:name=systemd:/x\n0::/x\n",
                "cgroup/unified/x/cpu.max": "100000 100000",
            },
            1.0,
        ),
        ({"membership": "garbage\n0::/x\n", "cgroup/x/cpu.max": "1 0\n"}, None),
        ({"membership": "0::/x\n", "cgroup/x/cpu.max": "\n"}, None),
    ],
)
def test_the_tightest_quota_of_either_version_holds(
    tmp_path: Path, files: dict[str, str], cpus: float | None
) -> None:
    assert cgroup_cpus(*tree(tmp_path, files)) == cpus


def test_a_machine_without_cgroups_has_no_quota(tmp_path: Path) -> None:
    assert cgroup_cpus(tmp_path / "none", tmp_path / "none either") is None


def test_affinity_and_quota_are_both_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    for quota, cpus in ((None, 3.0), (1.5, 1.5), (8.0, 3.0)):
        monkeypatch.setattr(worker_budget, "cgroup_cpus", lambda *_, quota=quota: quota)
        assert usable_cpus() == cpus


def test_where_there_is_no_affinity_every_processor_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    monkeypatch.setattr(worker_budget, "cgroup_cpus", lambda *_: None)
    assert usable_cpus() == 5.0


def test_too_many_workers_are_said_with_every_number() -> None:
    assert list(worker_problems(LOAD, cpus=8, shared_bytes=None)) == []
    (said,) = worker_problems(LOAD, cpus=7.5, shared_bytes=2**40)
    for word in ("--num-workers 2", "4 reading ranks", "8 worker", "3 loaders", "7.5 CPUs"):
        assert word in said
    assert said.endswith("use --num-workers 1")


def test_batches_that_do_not_fit_into_shared_memory_are_said() -> None:
    assert LOAD.bytes_in_flight == 2 * 3 * 4 * 2 * 2**20
    assert list(worker_problems(LOAD, cpus=64, shared_bytes=48 * 2**20)) == []
    (said,) = worker_problems(LOAD, cpus=64, shared_bytes=48 * 2**20 - 1)
    assert "up to 48.0 MiB" in said
    assert "--shm-size" in said


def test_without_workers_nothing_is_too_much() -> None:
    alone = WorkerLoad(num_workers=0, loaders=9, readers=9, batch_bytes=2**40)
    assert list(worker_problems(alone, cpus=0.1, shared_bytes=0)) == []


def test_a_warning_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log._SPEAKER, "said", set())
    monkeypatch.setattr(worker_budget, "usable_cpus", lambda: 1.0)
    for _ in range(2):
        announce_worker_budget(LOAD)
    assert capsys.readouterr().err.count("1 CPUs may be used here") == 1


def test_shared_memory_is_measured_where_there_is_some(tmp_path: Path) -> None:
    assert shared_memory_bytes(tmp_path / "none") is None
    free = shared_memory_bytes(tmp_path)
    assert free is not None
    assert free > 0
