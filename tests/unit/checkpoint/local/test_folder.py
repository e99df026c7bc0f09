"""The states in a node's folder: whole or not there, verified before use, of one run alone."""

from pathlib import Path

import pytest

from megatron.checkpoint.folder import manifest
from megatron.checkpoint.folder.manifest import GridLayout
from megatron.checkpoint.local import folder as folders
from megatron.checkpoint.local.folder import Facts, LocalFolder, stored_state, verified_state
from megatron.checkpoint.local.recovery import CopyKey
from megatron.errors import CheckpointError
from tests.unit.checkpoint.toy import snapshot_at

LAYOUT = GridLayout(tp=2, pp=1, dp=2)


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    made = LocalFolder(tmp_path / "memory", "0123456789abcdef", 4)
    made.make()
    return made


def write(folder: LocalFolder, owner: int, iteration: int) -> Path:
    snapshot = snapshot_at(2, 2, owner, iteration=iteration)
    folder.write(snapshot, iteration, layout=LAYOUT, facts=Facts(owner, "word", 5))
    return folder.directory(owner, iteration)


def test_a_state_says_whose_it_is_and_what_was_saved_before(folder: LocalFolder) -> None:
    state = verified_state(3, write(folder, 3, 7), threads=1)
    assert state.key == CopyKey(7, "word", 3)
    assert state.persistent == 5
    assert state.manifest.layout == LAYOUT
    assert state.manifest.progress["iteration"] == 7
    assert folder.states() == [(3, 7)]


def test_a_state_is_for_its_user_alone(folder: LocalFolder) -> None:
    write(folder, 0, 7)
    assert folder.path.stat().st_mode & 0o077 == 0


def test_a_state_is_not_taken_for_a_checkpoint(folder: LocalFolder) -> None:
    directory = write(folder, 0, 7)
    with pytest.raises(CheckpointError, match="has no manifest"):
        manifest.load(directory)
    (directory / manifest.PART).rename(directory / manifest.NAME)
    with pytest.raises(CheckpointError, match=r"do not make it up|generator files"):
        manifest.load(directory)


def test_every_byte_of_a_state_is_verified(folder: LocalFolder) -> None:
    directory = write(folder, 1, 7)
    for file in sorted(directory.iterdir()):
        whole = file.read_bytes()
        broken = bytearray(whole)
        broken[len(whole) // 2] ^= 1
        file.write_bytes(broken)
        with pytest.raises(CheckpointError, match="damaged"):
            verified_state(1, directory, threads=1)
        file.write_bytes(whole)
    assert verified_state(1, directory, threads=1).key.owner == 1


def test_former_states_are_removed_and_remains_with_them(folder: LocalFolder) -> None:
    for iteration in (6, 7):
        write(folder, 0, iteration)
        write(folder, 2, iteration)
    left = folder.stage(2, 8)
    folder.keep_only(0, 7)
    assert folder.states() == [(0, 7), (2, 6), (2, 7)]
    write(folder, 2, 8)
    assert not left.exists()


def test_the_last_who_removes_leaves_no_folder(folder: LocalFolder) -> None:
    write(folder, 0, 7)
    write(folder, 1, 7)
    folder.remove_owner(0)
    assert folder.states() == [(1, 7)]
    folder.remove_owner(1)
    folder.remove_owner(2)  # which has saved nothing
    assert not folder.root.exists()


def test_marks_are_of_one_meeting_and_are_removed_with_what_a_killed_process_left(
    folder: LocalFolder,
) -> None:
    folder.mark(0, "before")
    folder.mark(0, "now")
    folder.mark(3, "now")
    assert folder.marks("now") == [0, 3]
    folder.unmark(0)
    folder.unmark(3)
    assert list(folder.path.iterdir()) == []


def test_room_counts_what_is_there_already(
    folder: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = folder.room()
    monkeypatch.setattr(folders, "SHARED_MEMORY", folder.root)
    monkeypatch.setattr(folders, "available_memory_bytes", lambda: 1000)
    assert folder.room() == 1000
    directory = write(folder, 0, 7)
    size = sum(file.stat().st_size for file in directory.iterdir())
    assert folder.room() == 1000 + size
    assert before > 1000


def test_a_state_that_is_not_there_is_an_error_of_the_system(folder: LocalFolder) -> None:
    with pytest.raises(FileNotFoundError):
        stored_state(0, folder.directory(0, 1))


def test_a_state_in_the_folder_of_another_rank_is_refused(folder: LocalFolder) -> None:
    directory = write(folder, 1, 7)
    with pytest.raises(CheckpointError, match=r"not of the rank in whose folder(.|\n)*owner=1"):
        stored_state(0, directory)
