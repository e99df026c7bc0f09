"""An entry is built once, published whole, verified when loaded and rebuilt when damaged."""

import dataclasses
import errno
import json
import multiprocessing
import os
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megatron import log
from megatron.data.orders.index_cache import (
    CachedIndex,
    IndexCache,
    cache_folders,
    description_digest,
)
from megatron.data.orders.lease import LeaseTiming
from megatron.errors import ConfigError, DataError, MachineError
from tests.support.deadlines import HANG_S
from tests.unit.data.corpora import cache_in

DESCRIPTION = {"corpus": "abc", "seq_length": 8, "seed": 1}
ARRAYS = {
    "doc_idx": np.arange(5, dtype=np.int32),
    "sample_idx": np.arange(8, dtype=np.int32).reshape(4, 2),
}


class Builds:
    """A build function that counts how often it ran."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return ARRAYS


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch):
    monkeypatch.setattr(log._OUTPUT, "warned", set())


def equal(index):
    return all(
        index[key].tobytes() == array.tobytes()
        and (index[key].dtype, index[key].shape) == (array.dtype, array.shape)
        for key, array in ARRAYS.items()
    )


def test_an_index_is_built_once_and_then_loaded(tmp_path):
    build = Builds()
    cache = cache_in(tmp_path)
    assert equal(cache.load_or_build("train", DESCRIPTION, build=build))
    assert equal(cache.load_or_build("train", DESCRIPTION, build=build))
    assert build.count == 1
    names = sorted(path.name for path in (tmp_path / "index-cache").iterdir())
    stem = f"train-{description_digest(DESCRIPTION)}"
    assert names == [f"{stem}-doc_idx.npy", f"{stem}-sample_idx.npy", f"{stem}.json"]


def test_another_description_is_another_entry(tmp_path):
    build = Builds()
    for seed in (1, 2):
        cache_in(tmp_path).load_or_build("train", DESCRIPTION | {"seed": seed}, build=build)
    assert build.count == 2


def test_arrays_are_read_only_and_pickle_as_paths(tmp_path):
    index = cache_in(tmp_path).load_or_build("train", DESCRIPTION, build=Builds())
    assert isinstance(index["doc_idx"].base, np.memmap), "mapped, not copied"
    with pytest.raises(ValueError, match="read-only"):
        index["doc_idx"][0] = 1
    sent = pickle.dumps(index)
    assert b"sample_idx" in sent
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert isinstance(received, CachedIndex)
    assert equal(received)


def _flip_a_byte(folder):
    path = next(folder.glob("*sample_idx.npy"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _cut_short(folder):
    path = next(folder.glob("*doc_idx.npy"))
    path.write_bytes(path.read_bytes()[:-4])


def _remove(folder):
    next(folder.glob("*doc_idx.npy")).unlink()


def _change_manifest(**change):
    def damage(folder):
        path = next(folder.glob("*.json"))
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return damage


def _garbage_manifest(folder):
    next(folder.glob("*.json")).write_text("{")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_flip_a_byte, "has another checksum"),
        (_cut_short, "bytes, not"),
        (_remove, "No such file"),
        (_garbage_manifest, "Expecting property name"),
        (_change_manifest(format_version=0), "format_version 0"),
        (_change_manifest(description={}), "it describes another index"),
        (_change_manifest(arrays={"../../x": {}}), "no name of an array"),
        (_change_manifest(arrays=[1]), "has no attribute"),
    ],
)
def test_a_damaged_entry_is_announced_and_built_again(tmp_path, capsys, damage, reason):
    build = Builds()
    cache = cache_in(tmp_path)
    cache.load_or_build("train", DESCRIPTION, build=build)
    damage(tmp_path / "index-cache")
    assert equal(cache.load_or_build("train", DESCRIPTION, build=build))
    assert build.count == 2
    output = capsys.readouterr().err
    assert "is damaged" in output
    assert reason in output
    assert equal(cache.load_or_build("train", DESCRIPTION, build=build))
    assert build.count == 2
    assert capsys.readouterr().err == ""


def test_a_planted_pickle_is_not_executed(tmp_path):
    build = Builds()
    cache = cache_in(tmp_path)
    cache.load_or_build("train", DESCRIPTION, build=build)
    path = next((tmp_path / "index-cache").glob("*doc_idx.npy"))
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    assert equal(cache.load_or_build("train", DESCRIPTION, build=build))
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"):
        CachedIndex({"doc_idx": path})


def test_the_builder_builds_before_the_barrier_and_the_others_load_after_it(tmp_path):
    build, order = Builds(), []

    def wait():
        order.append(len(list((tmp_path / "index-cache").glob("*.json"))))

    cache_in(tmp_path, wait=wait).load_or_build("train", DESCRIPTION, build=build)
    other = cache_in(tmp_path, wait=wait, is_builder=False)
    assert equal(other.load_or_build("train", DESCRIPTION, build=build))
    assert order == [1, 1]
    assert build.count == 1


def test_a_builder_that_fails_still_reaches_the_barrier(tmp_path):
    waited = []

    def fail():
        raise DataError("broken", fix="mend it")

    cache = cache_in(tmp_path, wait=lambda: waited.append(1))
    with pytest.raises(DataError, match="broken"):
        cache.load_or_build("train", DESCRIPTION, build=fail)
    assert waited == [1]


def test_a_rank_that_does_not_see_the_builders_file_builds_its_own_and_says_so(tmp_path, capsys):
    build = Builds()
    cache = cache_in(tmp_path, is_builder=False, timing=LeaseTiming(settle_s=0.1))
    assert equal(cache.load_or_build("train", DESCRIPTION, build=build))
    assert build.count == 1
    assert "is not visible on this one" in capsys.readouterr().err


PATIENT = LeaseTiming(renew_s=0.05, lease_s=10.0, poll_s=0.01, log_every_s=0.1, give_up_s=60.0)


def test_two_builders_at_once_end_with_one_good_entry(tmp_path):
    """One is paused for longer than its lease, so that the other builds too."""
    paused = LeaseTiming(renew_s=60.0, lease_s=0.1, poll_s=0.01)
    inner, outer = Builds(), []

    def build_while_another_publishes():
        cache = cache_in(tmp_path, timing=paused)
        outer.append(cache.load_or_build("train", DESCRIPTION, build=inner))
        return ARRAYS

    index = cache_in(tmp_path, timing=paused).load_or_build(
        "train", DESCRIPTION, build=build_while_another_publishes
    )
    assert equal(index)
    assert equal(outer[0])
    assert equal(cache_in(tmp_path).load_or_build("train", DESCRIPTION, build=inner))
    assert inner.count == 1
    assert not list((tmp_path / "index-cache").glob("*.lock"))


def test_builders_of_several_jobs_build_once(tmp_path, capsys):
    build, started, indices = Builds(), threading.Event(), []

    def slow():
        started.set()
        time.sleep(0.4)
        return build()

    def first():
        cache = cache_in(tmp_path, timing=PATIENT)
        indices.append(cache.load_or_build("train", DESCRIPTION, build=slow))

    thread = threading.Thread(target=first)
    thread.start()
    assert started.wait(HANG_S)
    indices.append(
        cache_in(tmp_path, timing=PATIENT).load_or_build("train", DESCRIPTION, build=build)
    )
    thread.join()
    assert build.count == 1
    assert all(equal(index) for index in indices)
    output = capsys.readouterr().out
    assert f"waiting for process {os.getpid()} on" in output
    assert f"which is building the index train-{description_digest(DESCRIPTION)}" in output
    assert "still building the index train-" in output
    assert "built the index train-" in output
    assert "0 MiB" in output


def build_for_ever(folder, ready):
    def build():
        ready.set()
        time.sleep(600)

    cache_in(folder, timing=PATIENT).load_or_build("train", DESCRIPTION, build=build)


def build_soon(folder, result):
    timing = dataclasses.replace(PATIENT, lease_s=1.0)
    build = Builds()
    cache_in(folder, timing=timing).load_or_build("train", DESCRIPTION, build=build)
    result.put(build.count)


def test_a_builder_that_is_killed_is_replaced_by_one_that_waits(tmp_path, capfd):
    processes = multiprocessing.get_context("spawn")
    ready, result = processes.Event(), processes.Queue()
    one = processes.Process(target=build_for_ever, args=(tmp_path, ready), daemon=True)
    other = processes.Process(target=build_soon, args=(tmp_path, result), daemon=True)
    one.start()
    assert ready.wait(HANG_S)
    other.start()
    time.sleep(0.5)
    one.kill()
    assert result.get(timeout=60) == 1
    other.join(HANG_S)
    one.join(HANG_S)
    assert "is taken over for building the index" in capfd.readouterr().err
    assert equal(cache_in(tmp_path).load_or_build("train", DESCRIPTION, build=Builds()))
    assert not list((tmp_path / "index-cache").glob("*.lock"))


def test_a_rank_that_waits_says_so_and_for_what(tmp_path, capsys):
    cache = cache_in(tmp_path, wait=lambda: time.sleep(0.3), timing=PATIENT)
    cache.load_or_build("train", DESCRIPTION, build=Builds())
    output = capsys.readouterr().out
    digest = description_digest(DESCRIPTION)
    assert f"still waiting for the ranks that build the index train-{digest}" in output


@pytest.mark.parametrize("is_builder", [True, False])
def test_ranks_that_do_not_meet_name_the_index(tmp_path, is_builder):
    def time_out():
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")

    timing = LeaseTiming(settle_s=0.1)
    cache = cache_in(tmp_path, wait=time_out, is_builder=is_builder, timing=timing)
    with pytest.raises(MachineError, match="did not meet after the index train-") as raised:
        cache.load_or_build("train", DESCRIPTION, build=Builds())
    assert "Timed out waiting" in str(raised.value)
    assert "--distributed-timeout-minutes" in raised.value.fix


def test_ranks_that_were_silent_are_named_with_the_index(tmp_path):
    def give_up():
        raise MachineError("the ranks did not meet in time", found="rank 3", fix="look at it")

    with pytest.raises(MachineError, match="did not meet in time") as raised:
        cache_in(tmp_path, wait=give_up).load_or_build("train", DESCRIPTION, build=Builds())
    stem = f"train-{description_digest(DESCRIPTION)}"
    assert raised.value.__notes__ == [f"while waiting for the ranks that build the index {stem}"]


def test_an_unusable_first_folder_is_left_for_the_second_and_that_is_said(tmp_path, capsys):
    (tmp_path / "beside").write_text("a file where a folder should be")
    folders = (tmp_path / "beside", tmp_path / "home" / "cache")
    build = Builds()
    for _ in range(2):
        assert equal(IndexCache(folders=folders).load_or_build("t", DESCRIPTION, build=build))
    assert build.count == 1
    output = capsys.readouterr().err
    assert output.count("sample indices cannot be kept in") == 1
    assert str(folders[1]) in output


def test_no_usable_folder_is_a_configuration_error(tmp_path):
    (tmp_path / "index-cache").write_text("a file where a folder should be")
    with pytest.raises(ConfigError, match="no folder to keep sample indices") as raised:
        cache_in(tmp_path).load_or_build("train", DESCRIPTION, build=Builds())
    assert "--data-cache-path" in str(raised.value)


def test_a_full_disk_is_a_machine_error_and_leaves_no_entry(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(MachineError, match="cannot write"):
        cache_in(tmp_path).load_or_build("train", DESCRIPTION, build=Builds())
    assert list((tmp_path / "index-cache").iterdir()) == []


def test_an_array_needs_a_plain_name(tmp_path):
    with pytest.raises(ValueError, match="no name of an array"):
        cache_in(tmp_path).load_or_build("t", DESCRIPTION, build=lambda: {"a/b": np.arange(2)})


def test_folders_follow_the_flag_then_the_data_then_the_home():
    assert cache_folders("/data/wiki", "/fast") == (Path("/fast"),)
    beside, home = cache_folders("/data/wiki")
    assert beside == Path("/data/index-cache")
    assert home == Path.home() / ".cache" / "megatron-verified" / "index-cache"
    assert cache_folders("wiki")[0].is_absolute()
