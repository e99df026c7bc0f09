"""The folder of checkpoints: its content, errors about missing files, and cleaning up."""

import errno
import os
from types import SimpleNamespace

import pytest

from megatron import atomic
from megatron.checkpoint.files import durable
from megatron.checkpoint.folder import manifest as manifests
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.manifest import FileRecord
from megatron.checkpoint.folder.retention import Retention
from megatron.errors import CheckpointError, MachineError
from tests.unit.checkpoint.folder.test_manifest import DIGEST, example


def commit(folder, iteration):
    folder.mkdir(exist_ok=True)
    stage = folders.make_stage(folder, iteration)
    (stage / "a.safetensors").write_bytes(b"1234")
    content = example(
        iteration=iteration, tensors={}, files={"a.safetensors": FileRecord(4, DIGEST)}
    )
    (stage / manifests.NAME).write_bytes(manifests.encode(content))
    return folders.commit(stage, iteration)


def test_a_commit_is_the_latest_and_leaves_nothing_beside(tmp_path):
    commit(tmp_path, 5)
    commit(tmp_path, 100)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000005", "iter_0000100", folders.TRACKER]
    assert (tmp_path / folders.TRACKER).read_text() == "100\n"
    assert folders.latest_iteration(tmp_path) == 100
    assert folders.iterations(tmp_path) == [5, 100]


def test_the_same_iteration_can_be_committed_again(tmp_path):
    first = commit(tmp_path, 5)
    (first / "old").write_text("")
    commit(tmp_path, 5)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000005", folders.TRACKER]
    assert not (first / "old").exists()


def test_a_commit_reaches_the_disk_in_an_order_that_no_crash_can_break(tmp_path, monkeypatch):
    def recorded(owner, name, label):
        real = getattr(owner, name)

        def step(path, *args, **kwargs):
            steps.append(f"{label} {names[path.name.rpartition('-')[0] or path.name]}")
            return real(path, *args, **kwargs)

        monkeypatch.setattr(owner, name, step)

    names = {
        ".iter_0000005.partial": "stage",
        ".iter_0000005.replaced": "former",
        "iter_0000005": "former",
        folders.TRACKER: "tracker",
        tmp_path.name: "folder",
    }
    steps: list[str] = []
    recorded(atomic, "sync_directory", "sync")
    recorded(type(tmp_path), "rename", "rename")
    recorded(durable, "replace_file", "write")
    recorded(folders, "remove", "remove")
    commit(tmp_path, 5)
    end = ["rename stage", "sync folder", "write tracker", "sync folder"]
    assert steps == ["sync stage", *end]
    steps.clear()
    commit(tmp_path, 5)
    assert steps == ["sync stage", "rename former", *end, "remove former"]


def test_a_commit_that_cannot_rename_puts_the_former_checkpoint_back(tmp_path, monkeypatch):
    commit(tmp_path, 5)
    stage = folders.make_stage(tmp_path, 5)
    rename = type(stage).rename

    def fail(path, target):
        if path == stage:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(type(stage), "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        folders.commit(stage, 5)
    assert (tmp_path / "iter_0000005" / manifests.NAME).exists()


@pytest.mark.parametrize("name", ["iter_5", "iter_0000005.bak", "iter_00000005", "xiter_0000005"])
def test_names_that_are_not_exact_are_no_iterations(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / "iter_0000007").write_text("a file")
    (tmp_path / "iter_12345678").mkdir()
    assert folders.iterations(tmp_path) == [12345678]


@pytest.mark.parametrize("name", [".iter_0000005.partial-0123abcd", "notes.txt", ".probe-00"])
def test_a_folder_in_which_nothing_was_committed_never_held_a_checkpoint(tmp_path, name):
    assert folders.never_held_a_checkpoint(tmp_path / "missing")
    (tmp_path / name).mkdir()
    assert folders.never_held_a_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="never held a checkpoint"):
        folders.latest_iteration(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        folders.TRACKER,
        "iter_0000005",
        "release",
        "global_step10",
        "latest",
        "mp_rank_00",
        ".iter_0000005.replaced-0123abcd",
    ],
)
def test_any_trace_of_a_checkpoint_counts_as_having_held_one(tmp_path, name):
    (tmp_path / name).mkdir()
    assert not folders.never_held_a_checkpoint(tmp_path)


def test_a_folder_that_goes_while_it_is_looked_at_never_held_one(tmp_path, monkeypatch):
    """Another rank makes it to try it, and removes it: so runs failed at their first start."""
    real = folders._names

    def names(folder):
        folder.rmdir()
        return real(folder)

    monkeypatch.setattr(folders, "_names", names)
    (tmp_path / "run").mkdir()
    assert folders.never_held_a_checkpoint(tmp_path / "run")

    def too_early(folder):
        try:
            return real(folder)
        finally:
            folder.mkdir()

    monkeypatch.setattr(folders, "_names", too_early)
    assert folders.never_held_a_checkpoint(tmp_path / "run")


def test_a_file_or_a_dead_link_in_place_of_the_folder_is_no_fresh_start(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert not folders.never_held_a_checkpoint(tmp_path / "file")
    assert not folders.never_held_a_checkpoint(tmp_path / "link")
    assert folders.never_held_a_checkpoint(tmp_path / "file" / "run"), "that cannot be made"


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist") as caught:
        folders.latest_iteration(tmp_path / "typo")
    assert "typo" in str(caught.value)


def test_a_missing_tracker_beside_checkpoints_lists_them_and_how_to_name_one(tmp_path):
    commit(tmp_path, 5)
    commit(tmp_path, 10)
    (tmp_path / folders.TRACKER).unlink()
    with pytest.raises(CheckpointError, match="tracker file is missing") as caught:
        folders.latest_iteration(tmp_path)
    assert "iterations there: 5, 10" in str(caught.value)
    assert f"echo 10 > {tmp_path / folders.TRACKER}" in caught.value.fix


def test_checkpoints_of_another_tool_are_not_taken_for_ours(tmp_path):
    (tmp_path / "global_step10").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint of this program") as caught:
        folders.latest_iteration(tmp_path)
    assert "global_step10" in str(caught.value)


@pytest.mark.parametrize("text", ["", "ten", "-5", "5 6", "\x00\x01", "9" * 60, "0x5"])
def test_a_tracker_that_is_no_number_is_refused(tmp_path, text):
    commit(tmp_path, 5)
    (tmp_path / folders.TRACKER).write_text(text)
    with pytest.raises(CheckpointError, match="does not hold an iteration number") as caught:
        folders.latest_iteration(tmp_path)
    assert "iterations there: 5" in str(caught.value)


def test_a_garbled_tracker_without_checkpoints_says_how_to_start_anew(tmp_path):
    (tmp_path / folders.TRACKER).write_text("ten")
    with pytest.raises(CheckpointError, match="iteration number") as caught:
        folders.latest_iteration(tmp_path)
    assert "start anew" in caught.value.fix


def test_a_release_tracker_is_named_as_such(tmp_path):
    (tmp_path / folders.TRACKER).write_text("release")
    with pytest.raises(CheckpointError, match="release checkpoint"):
        folders.latest_iteration(tmp_path)


def test_a_tracker_of_a_missing_iteration_lists_those_that_are_there(tmp_path):
    commit(tmp_path, 5)
    (tmp_path / folders.TRACKER).write_text("6")
    with pytest.raises(CheckpointError, match="iteration 6 is not in the") as caught:
        folders.latest_iteration(tmp_path)
    assert "iterations there: 5" in str(caught.value)


def test_an_iteration_that_was_moved_aside_is_said_with_the_way_back(tmp_path):
    commit(tmp_path, 5).rename(tmp_path / ".iter_0000005.replaced-0123abcd")
    with pytest.raises(CheckpointError, match="iteration 5 is not in the") as caught:
        folders.latest_iteration(tmp_path)
    assert caught.value.fix.startswith("a save was cut short")
    assert f"mv {tmp_path}/.iter_0000005.replaced-0123abcd" in caught.value.fix


def test_an_iteration_of_an_empty_folder_is_missing_too(tmp_path):
    assert "check the path" in folders.missing_iteration(tmp_path, 5).fix
    assert "does not exist" in str(folders.missing_iteration(tmp_path / "x", 5))


def test_only_exact_leftovers_are_swept(tmp_path):
    stale = ".iter_0000005.partial-0123abcd"
    beside = f".{folders.TRACKER}.0123abcd"
    kept = [
        ".iter_0000005.partial-0123abc",
        ".iter_0000005.partial-0123ABCD",
        "iter_0000005.partial-0123abcd",
        ".iter_5.partial-0123abcd",
        ".iter_0000005.partial-0123abcd.mine",
    ]
    for name in (stale, *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("")
    (tmp_path / beside).write_text("5")
    (tmp_path / ".iter_0000006.partial-0123abcd").symlink_to(tmp_path / kept[0])
    folders.sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, ".iter_0000006.partial-0123abcd"])


def test_a_sweep_puts_back_a_checkpoint_whose_replacement_never_came(tmp_path, capsys):
    commit(tmp_path, 5).rename(tmp_path / ".iter_0000005.replaced-0123abcd")
    folders.sweep(tmp_path)
    assert folders.latest_iteration(tmp_path) == 5
    assert "the former one is back" in capsys.readouterr().err


def test_what_resists_removal_is_said(tmp_path, capsys):
    folders.remove(tmp_path / "missing")
    assert "remove it by hand" in capsys.readouterr().err


def test_retention_keeps_the_newest_whole_ones(tmp_path):
    for iteration in (1, 2, 3, 4, 5):
        commit(tmp_path, iteration)
    (tmp_path / "iter_0000004" / "a.safetensors").write_bytes(b"12")  # does not count
    assert folders.retire(tmp_path, Retention(2), newest=5) == [2, 1]
    assert folders.iterations(tmp_path) == [3, 4, 5]


def test_retention_touches_neither_later_iterations_nor_what_has_no_manifest(tmp_path):
    for iteration in (1, 2, 9):
        commit(tmp_path, iteration)
    (tmp_path / "iter_0000000" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000001.bak").mkdir()
    assert folders.retire(tmp_path, Retention(1), newest=2) == [1]
    left = ["iter_0000000", "iter_0000001.bak", "iter_0000002", "iter_0000009", folders.TRACKER]
    assert sorted(os.listdir(tmp_path)) == left


def sealed(folder, name, iteration):
    """A checkpoint in another framework's layout, which has folders of its own."""
    directory = folder / name
    (directory / "inner").mkdir(parents=True)
    (directory / "inner" / "a.pt").write_bytes(b"1234")
    files = {"inner/a.pt": FileRecord(4, DIGEST)}
    content = example(iteration=iteration, tensors={}, files=files)
    (directory / manifests.SEAL).write_bytes(manifests.encode(content))
    return directory


def test_retention_counts_checkpoints_of_every_layout(tmp_path):
    commit(tmp_path, 1)
    sealed(tmp_path, "iter_0000002", 2)
    sealed(tmp_path, "global_step3", 3)
    commit(tmp_path, 4)
    for name in ("global_step0", "global_step007", "global_step1_universal"):
        (tmp_path / name).mkdir()
    assert folders.saved_iterations(tmp_path) == [0, 1, 2, 3, 4]
    assert folders.retire(tmp_path, Retention(3), newest=4) == [1]
    assert folders.retire(tmp_path, Retention(1, every=2), newest=4) == [3]
    assert folders.retire(tmp_path, Retention(1), newest=4) == [2]
    left = ["global_step0", "global_step007", "global_step1_universal", "iter_0000004"]
    assert sorted(os.listdir(tmp_path)) == [*left, folders.TRACKER]


@pytest.mark.parametrize("note", ["note", "inner/note", "empty/", "inner/deeper/note"])
def test_a_folder_with_anything_of_its_owner_in_it_stays(tmp_path, note):
    directory = sealed(tmp_path, "global_step1", 1)
    commit(tmp_path, 2)
    path = directory / note
    (path if note.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
    if not note.endswith("/"):
        path.touch()
    assert folders.retire(tmp_path, Retention(1), newest=2) == []
    assert path.exists()


def test_a_release_is_told_from_an_iteration(tmp_path):
    assert not folders.names_release(tmp_path)
    (tmp_path / folders.TRACKER).write_text("release\n")
    assert folders.names_release(tmp_path)
    (tmp_path / folders.TRACKER).write_text("10\n")
    assert not folders.names_release(tmp_path)


def test_retention_deletes_nothing_while_too_few_are_whole(tmp_path):
    for iteration in (1, 2):
        (commit(tmp_path, iteration) / "a.safetensors").unlink()
    assert folders.retire(tmp_path, Retention(1), newest=2) == []


def test_a_folder_is_probed_by_a_file_that_goes_all_the_way(tmp_path):
    assert folders.probe_writable(tmp_path / "new" / "folder") is None
    assert os.listdir(tmp_path) == [], "what was missing is missing again"
    (tmp_path / "there").mkdir()
    assert folders.probe_writable(tmp_path / "there") is None
    assert os.listdir(tmp_path / "there") == []


def test_a_folder_that_cannot_be_written_is_an_error_with_its_path(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    error = folders.probe_writable(tmp_path / "file")
    assert isinstance(error, MachineError)
    assert str(tmp_path / "file") in str(error)

    def fail(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(folders.atomic, "sync_directory", fail)
    assert "Input/output error" in str(folders.probe_writable(tmp_path))
    assert os.listdir(tmp_path) == ["file"]


def test_a_probe_that_cannot_be_removed_does_not_hide_the_error(tmp_path, monkeypatch):
    def fail(path, *args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(type(tmp_path), "unlink", fail)
    assert "Read-only" in str(folders.probe_writable(tmp_path))


def test_a_disk_without_room_is_refused_with_both_numbers(tmp_path, monkeypatch):
    state = SimpleNamespace(f_bavail=3, f_frsize=1000)
    monkeypatch.setattr(os, "statvfs", lambda path: state)
    folders.require_space(tmp_path, 3000)
    with pytest.raises(CheckpointError, match="no room") as caught:
        folders.require_space(tmp_path, 3001)
    assert "3,001 bytes needed, 3,000 free" in str(caught.value)
