"""Full disks, folders without write permission, and builders that ended early."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron import log
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from megatron.data.orders.index_cache import IndexCache, cache_folders, description_digest
from megatron.data.orders.lease import LeaseTiming
from megatron.errors import MachineError
from tests.architecture.source_tree import ROOT
from tests.support.checkpoints.small_disk import read_only, small_disk
from tests.unit.data.corpora import cache_in, random_sizes, write_corpus

pytestmark = pytest.mark.slow

DESCRIPTION = {"corpus": "abc", "seed": 1}
SOON = LeaseTiming(
    renew_s=0.05, lease_s=0.4, poll_s=0.01, log_every_s=0.1, give_up_s=60.0, settle_s=0.1
)


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch):
    monkeypatch.setattr(log._OUTPUT, "warned", set())


class NoRoom:
    """A file, of which the disk is full."""

    def __init__(self, file):
        self.file = file

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, _):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_no_index_and_the_next_attempt_with_room_builds_it(
    tmp_path, monkeypatch
):
    def build():
        return {"doc_idx": np.arange(10), "sample_idx": np.arange(2**18)}

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        full = tmp_path / "full"
        with small_disk(full, kib=256, otherwise=lambda: patch.setattr(np, "save", fail)):
            with pytest.raises(MachineError, match="cannot write") as raised:
                cache_in(full).load_or_build("train", DESCRIPTION, build=build)
            assert "No space left on device" in str(raised.value)
            assert list((full / "index-cache").iterdir()) == []
    index = cache_in(tmp_path).load_or_build("train", DESCRIPTION, build=build)
    assert index["sample_idx"].shape == (2**18,)


def test_a_disk_too_full_for_a_lock_is_a_machine_error_and_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    full = tmp_path / "full"
    with small_disk(full, kib=16, otherwise=lambda: monkeypatch.setattr(os, "pwrite", fail)):
        cache = cache_in(full)
        cache.folders[0].mkdir()
        (full / "ballast").write_bytes(b"")
        with open(full / "ballast", "ab", buffering=0) as file:
            try:
                for _ in range(64):
                    file.write(bytes(1024))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        with pytest.raises(MachineError, match="cannot write"):
            cache.load_or_build("train", DESCRIPTION, build=lambda: {"doc_idx": np.arange(3)})
        assert list(cache.folders[0].iterdir()) == []


def write(prefix, documents):
    with MMapIndexedDatasetBuilder(prefix, np.uint16) as builder:
        for tokens in documents:
            builder.add_document(tokens)


@pytest.mark.parametrize("documents", [1, 4000])
def test_a_corpus_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path, monkeypatch, documents):
    """Whether it is the tokens that find no room, or the index that comes after them."""
    tokens = np.arange(300_000 if documents == 1 else 1) % 60000
    real_open = open

    def refuse(path, *args, **kwargs):
        file = real_open(path, *args, **kwargs)
        return NoRoom(file) if "full" in str(path) and ".tmp" in str(path) else file

    full = tmp_path / "full"
    with (
        monkeypatch.context() as patch,
        small_disk(full, kib=32, otherwise=lambda: patch.setattr("builtins.open", refuse)),
    ):
        with pytest.raises(MachineError, match="cannot write") as raised:
            write(full / "c", [tokens] * documents)
        assert "No space left on device" in str(raised.value)
        assert list(full.iterdir()) == []


def test_a_corpus_in_a_folder_that_cannot_be_written_has_its_index_at_home(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    data = tmp_path / "data"
    data.mkdir()
    prefix = write_corpus(data / "c", random_sizes(30))
    before = sorted(path.name for path in data.iterdir())
    real_mkdir = os.mkdir

    def refuse(path, *args, **kwargs):
        if Path(path).is_relative_to(data):
            raise OSError(errno.EROFS, "Read-only file system")
        real_mkdir(path, *args, **kwargs)

    with read_only(data, otherwise=lambda: monkeypatch.setattr(os, "mkdir", refuse)):
        corpus = MMapIndexedDataset(prefix)
        for _ in range(2):
            dataset = GPTDataset(
                corpus,
                name="train",
                documents=np.arange(len(corpus)),
                num_samples=20,
                seq_length=8,
                seed=1,
                cache=IndexCache(folders=cache_folders(prefix)),
            )
            assert len(dataset[0]["text"]) == 9
        assert sorted(path.name for path in data.iterdir()) == before
    files = [Path(path) for path in dataset.index_files.values()]
    assert all(path.is_relative_to(tmp_path / "home") for path in files)
    output = capsys.readouterr().err
    assert output.count("sample indices cannot be kept in") == 1
    assert str(tmp_path / "home") in output


def test_a_lock_that_a_dead_builder_left_holds_nobody_up(tmp_path, capsys):
    cache = cache_in(tmp_path, timing=SOON)
    cache.folders[0].mkdir()
    lock = cache.folders[0] / f"train-{description_digest(DESCRIPTION)}.lock"
    lock.write_text('{"process": 7, "host": "gone", "time": "then", "report_progress": 3}')
    built = []
    index = cache.load_or_build(
        "train", DESCRIPTION, build=lambda: built.append(1) or {"doc_idx": np.arange(3)}
    )
    assert (index["doc_idx"].tolist(), built) == ([0, 1, 2], [1])
    assert "of process 7 on gone was not renewed" in capsys.readouterr().err
    assert not lock.exists()


BUILDER = """
import sys, time
from pathlib import Path
import numpy as np
from megatron.data.orders.index_cache import IndexCache
from megatron.data.orders.lease import LeaseTiming

def build():
    print("building", flush=True)
    time.sleep(float(sys.argv[2]))
    return {"doc_idx": np.arange(1000), "sample_idx": np.arange(2**21)}

timing = LeaseTiming(renew_s=0.05, lease_s=0.6, poll_s=0.01, log_every_s=60.0, settle_s=0.1)
cache = IndexCache(folders=(Path(sys.argv[1]),), timing=timing)
index = cache.load_or_build("train", {"corpus": "abc", "seed": 1}, build=build)
assert index["sample_idx"][-1] == 2**21 - 1
print("done", flush=True)
"""


@pytest.mark.parametrize("at_s", [0.0, 0.02, 0.05])
def test_of_two_processes_that_build_one_cache_one_may_be_killed_at_any_moment(tmp_path, at_s):
    """While it builds, or while it writes: the other ends with an entry that is whole."""
    victim, other = (
        subprocess.Popen(
            [sys.executable, "-c", BUILDER, str(tmp_path), work_s],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for work_s in ("0.05", "0.2")
    )
    try:
        first = next(iter(victim.stdout.readline, ""))
        if first == "building\n":
            time.sleep(0.05 + at_s)
        victim.send_signal(signal.SIGKILL)
        out, err = other.communicate(timeout=60)
    finally:
        for process in (victim, other):
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()
    assert out.endswith("done\n"), err
    cache = IndexCache(folders=(tmp_path,))
    index = cache.load_or_build("train", DESCRIPTION, build=lambda: pytest.fail("built again"))
    assert index["doc_idx"].tolist() == list(range(1000))
    assert not list(tmp_path.glob("*.lock"))
