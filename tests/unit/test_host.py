"""Quotas and limits are read from folders as kernels lay them out."""

import gc
import mmap
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from megatron import host
from megatron.host import (
    available_memory_bytes,
    cgroup_cpus,
    cgroup_memory_bytes,
    keep_freed_memory,
    kills_for_memory,
    lasting_objects,
    peak_resident_bytes,
    processor_vendor,
    reset_peak_resident,
    resident_bytes,
    shared_memory_bytes,
    usable_cpus,
)
from tests.support.ranks import run_on_ranks

SPIKE = 200 * 2**20


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
        monkeypatch.setattr(host, "cgroup_cpus", lambda *_, quota=quota: quota)
        assert usable_cpus() == cpus


def test_where_there_is_no_affinity_every_processor_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    monkeypatch.setattr(host, "cgroup_cpus", lambda *_: None)
    assert usable_cpus() == 5.0


NEW = "anon 70\nfile 25\nactive_file 10\ninactive_file 15\nshmem 5\n"
OLD = "inactive_file 1\nactive_file 1\ntotal_inactive_file 15\ntotal_active_file 10\n"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        (
            {
                "membership": "0::/job\n",
                "cgroup/job/memory.max": "200\n",
                "cgroup/job/memory.current": "100\n",
                "cgroup/job/memory.stat": NEW,
            },
            200 - (100 - 25),
        ),
        (
            {
                "membership": "0::/job\n",
                "cgroup/job/memory.max": "max\n",
                "cgroup/job/memory.current": "100\n",
                "cgroup/memory.max": "120\n",
                "cgroup/memory.current": "110\n",
            },
            10,
        ),
        (
            {
                "membership": "4:memory:/docker/x\n3:cpu:/\n",
                "cgroup/memory/docker/x/memory.limit_in_bytes": "200\n",
                "cgroup/memory/docker/x/memory.usage_in_bytes": "250\n",
                "cgroup/memory/docker/x/memory.stat": OLD,
            },
            0,
        ),
        ({"membership": "4:cpu:/x\n", "cgroup/memory/x/memory.limit_in_bytes": "2\n"}, None),
    ],
)
def test_pages_of_files_count_as_free_under_a_limit_of_memory(
    tmp_path: Path, files: dict[str, str], left: int | None
) -> None:
    assert cgroup_memory_bytes(*tree(tmp_path, files)) == left


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({}, 0),
        ({"membership": "0::/\n", "cgroup/memory.max": "max\n"}, 0),
        (  # v2: the counter of a group has those within it
            {
                "membership": "0::/job\n",
                "cgroup/job/memory.events": "oom 5\noom_kill 3\noom_group_kill 9\n",
                "cgroup/job/rank/memory.events": "oom_kill 2\n",
                "cgroup/memory.events": "oom_kill 40\n",
            },
            3,
        ),
        (  # v1: a group of its own counts its own
            {
                "membership": "4:memory:/job\n0::/\n",
                "cgroup/memory/job/memory.oom_control": "under_oom 1\noom_kill 3\n",
                "cgroup/memory/job/rank/memory.oom_control": "oom_kill 2\n",
                "cgroup/memory/other/memory.oom_control": "oom_kill 40\n",
                "cgroup/memory/memory.oom_control": "oom_kill 80\n",
            },
            5,
        ),
        ({"membership": "4:memory:/a/b\n", "cgroup/memory/memory.oom_control": "oom_kill 1\n"}, 1),
        ({"membership": "4:memory:/\n", "cgroup/memory/memory.oom_control": "old kernel\n"}, 0),
    ],
)
def test_kills_for_memory_are_those_of_the_own_group_and_of_groups_within(
    tmp_path: Path, files: dict[str, str], kills: int
) -> None:
    assert kills_for_memory(*tree(tmp_path, files)) == kills


def test_the_less_of_the_kernel_s_word_and_the_cgroup_s_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal:  100 kB\nMemFree: 1 kB\nMemAvailable:    20 kB\n")
    monkeypatch.setattr(host, "_MEMORY", memory)
    for limit, expected in ((None, 20 * 1024), (30 * 1024, 20 * 1024), (5, 5)):
        monkeypatch.setattr(host, "cgroup_memory_bytes", lambda *_, limit=limit: limit)
        assert available_memory_bytes() == expected
    memory.write_text("nothing\n")
    assert available_memory_bytes() == 5
    monkeypatch.setattr(host, "cgroup_memory_bytes", lambda *_: None)
    assert available_memory_bytes() is None


def test_shared_memory_is_measured_where_there_is_some(tmp_path: Path) -> None:
    assert shared_memory_bytes(tmp_path / "none") is None
    free = shared_memory_bytes(tmp_path)
    assert free is not None
    assert free > 0


def test_bytes_are_said_in_the_unit_of_memory() -> None:
    assert host.in_gib(3 * 2**29) == "1.50 GiB"


# Page faults of the second half of ten buffers of 64 MiB, each freed before the next is taken.
FAULTS = """
import ctypes, resource, sys
from megatron.host import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for number in range(10):
    if number == 5:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffer = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(64 << 20)))
    ctypes.memset(buffer, 1, 64 << 20)
    libc.free(buffer)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_that_is_kept_is_not_taken_page_by_page_again() -> None:
    faults = {
        word: int(subprocess.check_output([sys.executable, "-c", FAULTS, word], timeout=60))
        for word in ("keep", "return")
    }
    assert faults["keep"] < 100
    assert faults["return"] > 5 * 64 * 4  # at the least one for every 64 KiB


def test_a_c_library_without_the_setting_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.host.ctypes.CDLL", lambda name: object())
    assert not keep_freed_memory()


def test_figures_of_the_kernel_are_bytes_and_another_unit_is_refused() -> None:
    status = "VmPeak:\t 9000 kB\nVmHWM:\t  123 kB\nVmRSS:\t  100 kB\n"
    assert resident_bytes("VmHWM", status) == 123 * 1024
    assert resident_bytes("VmRSS", status) == 100 * 1024
    assert resident_bytes("VmRSS") > 2**20
    for other in ("VmHWM: 3 MB\n", "VmRSS: 3 kB\n"):
        with pytest.raises(OSError, match="no VmHWM in kB"):
            resident_bytes("VmHWM", other)


def take_and_free(size: int) -> None:
    """Write to so many bytes of new pages, and give them back to the kernel at once."""
    with mmap.mmap(-1, size) as pages:
        for at in range(0, size, mmap.PAGESIZE):
            pages[at] = 1


def peaks_with_spikes() -> list[int]:
    """Return peaks: before, after a spike, after a reset, and after a spike of a child."""
    can_reset = reset_peak_resident()
    assert can_reset
    found = [peak_resident_bytes(with_children=True)]
    take_and_free(SPIKE)
    found.append(peak_resident_bytes())
    assert reset_peak_resident()
    found.append(peak_resident_bytes())
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        take_and_free(SPIKE)
        os.write(writer, b"done")
        signal.pause()  # until it is killed
    os.read(reader, 4)
    found += [peak_resident_bytes(), peak_resident_bytes(with_children=True)]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return [*found, peak_resident_bytes(with_children=True)]


def test_a_short_spike_is_seen_and_forgotten_after_a_reset() -> None:
    ((before, spike, after, parent, both, ended),) = run_on_ranks(1, peaks_with_spikes)
    assert spike - before > 0.9 * SPIKE
    assert after - before < 0.2 * SPIKE
    assert parent - after < 0.2 * SPIKE, "the child's memory is its own"
    assert both - parent > 0.9 * SPIKE
    assert ended < both


def test_without_the_kernel_s_mark_the_system_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(field: str, status: str | None = None) -> int:
        raise FileNotFoundError

    own = peak_resident_bytes()
    monkeypatch.setattr(host, "resident_bytes", absent)
    # Of a process that was forked it may be the peak of its parent, never less than its own.
    assert peak_resident_bytes() >= 0.9 * own
    monkeypatch.setattr(host, "_descendants", lambda process: iter([0]))
    assert reset_peak_resident() is False


class Circle:
    """What only a collection of garbage finds."""

    def __init__(self) -> None:
        self.own = self


def collections_of_circles() -> None:
    # A process of a test is forked from one that has left its objects out.
    host._FROZEN_BY_PYTHON = gc.get_freeze_count()
    callbacks = list(gc.callbacks)
    first, old = Circle(), Circle()
    of_first, of_old = weakref.ref(first), weakref.ref(old)
    with lasting_objects():
        del first
        gc.collect()
        assert of_first() is None
        of_new = weakref.ref(Circle())
        del old
        gc.collect()
        assert of_new() is None
        assert of_old() is not None
    gc.collect()
    assert of_old() is None
    with lasting_objects():
        pass  # with no full collection
    assert gc.callbacks == callbacks


def test_what_a_full_collection_has_found_in_use_is_looked_at_by_no_other() -> None:
    run_on_ranks(1, collections_of_circles)  # whose end brings objects of others back


def collections_in_a_process_that_was_forked() -> tuple[int, int]:
    before = gc.get_freeze_count()
    with lasting_objects():
        gc.collect()
    return before, gc.get_freeze_count()


def test_what_others_have_left_out_of_collections_stays_so() -> None:
    """Ranks of tests are forked from a Python that has done so: else each looks at all of it."""
    ((before, after),) = run_on_ranks(1, collections_in_a_process_that_was_forked)
    assert before == after > 100_000


def test_the_maker_of_a_processor_is_read_once_of_all_its_cores(tmp_path: Path) -> None:
    described = tmp_path / "cpuinfo"
    assert processor_vendor(described) == ""
    core = "processor\t: {}\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\n\n"
    described.write_text(core.format(0) + core.format(1))
    assert processor_vendor(described) == "AuthenticAMD"
    described.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert processor_vendor(described) == ""
