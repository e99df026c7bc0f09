"""The folder that --save and --load name: iterations, the tracker file, staging, retention.

    SAVE/iter_0000100/                        a whole checkpoint; it appears by one rename
    SAVE/latest_checkpointed_iteration.txt    "100"; replaced by rename, last of all
    SAVE/.iter_0000100.partial-1f3a5c7e/      a save under way, or one that crashed

`object_folder` does the same in a store of objects. One process works on a folder at a time, chosen
by `storage`. No torch here.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, overload

from megatron import atomic, log
from megatron.checkpoint.files import durable
from megatron.checkpoint.files.store import Place, RemotePath, place, write_object
from megatron.checkpoint.folder import manifest, object_folder, verify
from megatron.checkpoint.folder.manifest import Manifest
from megatron.checkpoint.folder.retention import FoundCheckpoint, Retention, redundant
from megatron.errors import CheckpointError, MachineError, MegatronError
from megatron.host import free_bytes

TRACKER = "latest_checkpointed_iteration.txt"
RUN_ID = "run_id.txt"  # tells a run from another one, before it has saved anything
RELEASE = "release"  # Megatron's word for weights without an iteration
_ITERATION = re.compile(r"iter_(\d{7}|[1-9]\d{7,})")
_DEEPSPEED = re.compile(r"global_step(0|[1-9]\d*)")
_LEFTOVER = re.compile(
    r"\.(iter_\d{7,}|global_step\d+(?:_universal)?)\.(partial|replaced|removed)-[0-9a-f]{8}"
)
# A tracker of ours or DeepSpeed's that a save had not put in place yet.
_TRACKER_BESIDE = re.compile(rf"\.({re.escape(TRACKER)}|latest|latest_universal)\.[0-9a-f]{{8}}")
_ANY_CHECKPOINT = re.compile(r"iter_\d+|release|global_step\d+.*|latest|mp_rank_\d+.*")
_TRACKER_BYTES = 64


def iteration_name(iteration: int) -> str:
    """Return the name of the folder of one iteration: `iter_0000100`."""
    return f"iter_{iteration:07d}"


def iterations(folder: Place) -> list[int]:
    """Return the iterations that have a folder of exactly the right name, oldest first."""
    if not folder.is_dir():
        return []
    found = [(_ITERATION.fullmatch(entry.name), entry) for entry in folder.iterdir()]
    return sorted(int(match[1]) for match, entry in found if match and entry.is_dir())


def deepspeed_name(iteration: int) -> str:
    """Return the name of the folder of one iteration in DeepSpeed's layout: `global_step100`."""
    return f"global_step{iteration}"


def deepspeed_iterations(folder: Place) -> list[int]:
    """Return the iterations that were saved in DeepSpeed's layout, oldest first."""
    if not isinstance(folder, Path) or not folder.is_dir():
        return []
    found = [(_DEEPSPEED.fullmatch(entry.name), entry) for entry in folder.iterdir()]
    return sorted(int(match[1]) for match, entry in found if match and entry.is_dir())


def never_held_a_checkpoint(folder: str | Place) -> bool:
    """Return whether `folder` shows no trace of a checkpoint of this or another tool.

    True for a folder that does not exist, and for one in which only a first save was cut short.
    """
    folder = place(folder)
    if isinstance(folder, RemotePath) and not folder.is_dir():
        return True  # without objects there is no folder
    # Listed once: the probe of another rank may make and remove the folder meanwhile.
    try:
        names = _names(folder)
    except FileNotFoundError:
        return not folder.is_symlink()  # a link to an unmounted disk is no new folder
    except NotADirectoryError:
        return not os.path.lexists(str(folder))
    for name in names:
        moved = _LEFTOVER.fullmatch(name)
        if name == TRACKER or _ANY_CHECKPOINT.fullmatch(name) or (moved and moved[2] != "partial"):
            return False
    return True


def _names(folder: Place) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def saved_iterations(folder: Place) -> list[int]:
    """Return the iterations that have a folder in any layout, oldest first."""
    return sorted({*iterations(folder), *deepspeed_iterations(folder)})


def latest_iteration(folder: str | Place, *, of: Sequence[int] | None = None) -> int:
    """Return the iteration that the tracker file names.

    Args:
        of: the iterations that count as being there; those of `iterations` when not given.

    Raises:
        CheckpointError: there is no such folder, it never held a checkpoint, its tracker is
            missing or not a number, or the iteration it names is not there.
    """
    folder = place(folder)
    if not folder.is_dir():
        raise _no_folder(folder)
    present = iterations(folder) if of is None else list(of)
    try:
        text = _tracker_text(folder)
    except FileNotFoundError:
        raise _no_tracker(folder, present) from None
    if text == RELEASE:
        raise CheckpointError(
            "the tracker file names a release checkpoint that is not there, or of no known format",
            found=f"{folder / TRACKER}",
            fix="convert it first, or load a folder that this program wrote",
        )
    if not re.fullmatch(r"\d{1,18}", text):
        raise CheckpointError(
            "the tracker file does not hold an iteration number",
            found=f"{text!r} in {folder / TRACKER}; {_listed(present)}",
            fix=_tracker_fix(folder, present),
        )
    if int(text) not in present:
        raise missing_iteration(folder, int(text))
    return int(text)


def names_release(folder: Place) -> bool:
    """Return whether the tracker file names a release, which is no iteration."""
    return (folder / TRACKER).is_file() and _tracker_text(folder) == RELEASE


def _tracker_text(folder: Place) -> str:
    with (folder / TRACKER).open("rb") as file:
        return file.read(_TRACKER_BYTES).decode("ascii", "replace").strip(" \t\r\n")


def _no_folder(folder: Place) -> CheckpointError:
    return CheckpointError(
        "the folder to load a checkpoint from does not exist",
        found=str(folder),
        fix="check the path after --load, and that its disk is mounted",
    )


def _no_tracker(folder: Place, present: list[int]) -> CheckpointError:
    if present:
        return CheckpointError(
            "the tracker file is missing beside existing checkpoints",
            found=f"no {TRACKER} in {folder}; {_listed(present)}",
            fix=_tracker_fix(folder, present),
        )
    if never_held_a_checkpoint(folder):
        return CheckpointError(
            "the folder to load from has never held a checkpoint",
            found=str(folder),
            fix="check the path after --load; to start from random weights leave --load out",
        )
    return CheckpointError(
        "the folder holds no checkpoint of this program",
        found=f"{folder} with {', '.join(_names(folder)[:5])}",
        fix="convert what is there first, or load a folder that this program wrote",
    )


def missing_iteration(folder: Place, iteration: int) -> CheckpointError:
    """Return the error for an iteration that is not in `folder`, or a folder that is not there."""
    if not folder.is_dir():
        return _no_folder(folder)
    name = iteration_name(iteration)
    aside = [entry for entry in _names(folder) if entry.startswith(f".{name}.replaced-")]
    present = iterations(folder)
    if aside:
        fix = f"a save was cut short while it replaced it: mv {folder / aside[0]} {folder / name}"
    elif present:
        fix = _tracker_fix(folder, present)
    else:
        fix = "check the path after --load"
    return CheckpointError(
        f"iteration {iteration} is not in the checkpoint folder",
        found=f"no {name} in {folder}; {_listed(present)}",
        fix=fix,
    )


def _listed(present: list[int]) -> str:
    if not present:
        return "no iterations there"
    return "iterations there: " + ", ".join(str(iteration) for iteration in present[-8:])


def _tracker_fix(folder: Place, present: list[int]) -> str:
    if not present:
        return f"remove {folder / TRACKER} if the folder is to start anew"
    return f"check the newest and name it: echo {present[-1]} > {folder / TRACKER}"


def run_id(folder: Place) -> str:
    """Return the id of the run that saves in `folder`: 16 hexadecimal digits, made once.

    Raises:
        CheckpointError: the file holds something else.
    """
    path = folder / RUN_ID
    if not path.is_file():
        if isinstance(folder, Path):
            folder.mkdir(parents=True, exist_ok=True)
        write_object(path, secrets.token_hex(8).encode())
    text = path.read_bytes().decode("ascii", "replace").strip()
    if not re.fullmatch(r"[0-9a-f]{16}", text):
        raise CheckpointError(
            "the id of the run is damaged",
            found=f"{text[:40]!r} in {path}",
            fix="remove the file: local checkpoints of before are not used then",
        )
    return text


def probe_writable(folder: str | Place) -> MegatronError | None:
    """Return why a checkpoint could not be written to `folder`; None if a test file could.

    The file is written, made durable, renamed and removed, and so is a folder that was missing: a
    launch that is refused for another reason leaves nothing behind. In a store of objects it is
    written, read back, listed and removed.
    """
    try:
        folder = place(folder)
        if isinstance(folder, RemotePath):
            object_folder.probe(folder)
            return None
    except MegatronError as error:
        return error
    except OSError as error:
        return _machine_error(error)
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    probe = folder / f".probe-{secrets.token_hex(8)}"
    moved = probe.with_suffix(".moved")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        durable.write_file(probe, b"probe")
        probe.rename(moved)
        atomic.sync_directory(folder)
        moved.unlink()
    except OSError as error:
        for path in (probe, moved):
            _unlink_quietly(path)
        return _machine_error(error)
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # never made, or in use by another run by now
                path.rmdir()
    return None


def _machine_error(error: OSError) -> MachineError:
    found = durable.from_os_error(error, "writing to the folder for checkpoints")
    return MachineError(found.problem, found=found.found, fix=found.fix)


def _unlink_quietly(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # the probe's own error is the one to report
        log.debug(f"{path} is left behind: {error}")


def require_space(folder: Place, needed: int) -> None:
    """Raise CheckpointError when the file system of `folder` has not `needed` bytes for this user.

    A store of objects does not report its free space.
    """
    if isinstance(folder, RemotePath):
        return
    free = free_bytes(folder)
    if free < needed:
        raise CheckpointError(
            "the disk has no room for the next checkpoint",
            found=f"{needed:,} bytes needed, {free:,} free on the file system of {folder}",
            fix="free space, save to another disk, or keep fewer checkpoints (--keep-last 2)",
        )


def begin(folder: Place) -> None:
    """Make the folder if it is missing, and remove the remains of interrupted saves."""
    if isinstance(folder, RemotePath):
        object_folder.sweep(folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)


def refuse_existing(folder: Path, iteration: int) -> None:
    """Raise CheckpointError if `iteration` exists: only a resumed run may replace it."""
    final = folder / iteration_name(iteration)
    if final.exists():
        raise CheckpointError(
            "the folder to write to holds this iteration already",
            found=str(final),
            fix="write to another folder, or move that one away",
        )


class StageName(NamedTuple):
    """The stage of rank 0, as sent to the other ranks."""

    name: str
    token: str | None  # marks the objects of this save; None on a disk


def stage_name(stage: Place) -> StageName:
    """Return the name by which other ranks find `stage`."""
    return StageName(stage.name, stage.token if isinstance(stage, RemotePath) else None)


def stage_called(folder: Place, stage: StageName) -> Place:
    """Return the stage in `folder` that another rank made."""
    if isinstance(folder, RemotePath):
        return RemotePath(folder.scheme, f"{folder.key}/{stage.name}", folder.fs, stage.token)
    return folder / stage.name


@overload
def make_stage(folder: Path, iteration: int) -> Path:
    """Return a new folder on a disk."""


@overload
def make_stage(folder: RemotePath, iteration: int) -> RemotePath:
    """Return a new folder in a store of objects."""


def make_stage(folder: Place, iteration: int) -> Place:
    """Return a new place to write the files of `iteration` to, invisible to readers."""
    if isinstance(folder, RemotePath):
        return object_folder.make_stage(folder, iteration_name(iteration))
    stage = folder / f".{iteration_name(iteration)}.partial-{secrets.token_hex(4)}"
    stage.mkdir()
    return stage


@overload
def commit(stage: Path, iteration: int) -> Path:
    """Commit on a disk."""


@overload
def commit(stage: RemotePath, iteration: int) -> RemotePath:
    """Commit in a store of objects."""


def commit(stage: Place, iteration: int) -> Place:
    """Make the finished `stage` the checkpoint of `iteration`, atomically for readers."""
    if isinstance(stage, RemotePath):
        return object_folder.commit(stage, stage.parent / TRACKER, iteration)
    return publish(stage, iteration_name(iteration), {TRACKER: f"{iteration}\n"})


def publish(stage: Path, name: str, trackers: Mapping[str, str]) -> Path:
    """Rename the finished `stage` to `name` beside it; then replace each tracker file, in order.

    An existing folder of that name is moved aside first and deleted once the new one is in place.
    """
    folder, token = stage.parent, stage.name[-8:]
    final = folder / name
    aside = folder / f".{final.name}.replaced-{token}"
    atomic.sync_directory(stage)
    replaces = final.exists()
    if replaces:
        final.rename(aside)
    try:
        stage.rename(final)
    except OSError:
        if replaces:
            aside.rename(final)
        raise
    atomic.sync_directory(folder)
    for tracker, text in trackers.items():
        durable.replace_file(folder / tracker, text.encode(), suffix=token)
    if replaces:
        remove(aside)
    return final


def remove(directory: Place) -> None:
    """Delete a folder that readers no longer see; what cannot be deleted is logged and left behind.

    In a store of objects: the parts of a stage.
    """
    if isinstance(directory, RemotePath):
        object_folder.discard(directory)
        return
    try:
        shutil.rmtree(directory)
    except OSError as error:
        log.warning(f"{directory} could not be removed ({error}); remove it by hand")


def sweep(folder: Path) -> None:
    """Remove the remains of interrupted saves, and put back a checkpoint they had moved aside.

    Only folders whose names match exactly. No other process may be saving to `folder`.
    """
    for entry in sorted(os.listdir(folder)):
        match = _LEFTOVER.fullmatch(entry)
        path = folder / entry
        if _TRACKER_BESIDE.fullmatch(entry):
            path.unlink()
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        final = folder / match[1]
        if match[2] == "replaced" and not final.exists():
            log.warning(f"a save was cut short while it replaced {final}: the former one is back")
            path.rename(final)
            atomic.sync_directory(folder)
        else:
            log.info(f"removing what a save that was cut short left behind: {path}")
            remove(path)


def retire(folder: Place, rule: Retention, *, newest: int) -> list[int]:
    """Delete what `rule` makes redundant by the whole checkpoint of `newest`.

    Whole: a valid manifest (in another framework's layout: a seal), and every file of its length.
    Iterations after `newest` (of a run that was rolled back) are neither counted nor touched. A
    folder goes only if its manifest is readable and of its iteration, and it holds nothing that the
    manifest does not name. Returns what was deleted.
    """
    contents: dict[int, tuple[Place, Manifest]] = {}
    found: list[FoundCheckpoint] = []
    for iteration, directory in _latest_first(folder, newest):
        # No file is read of checkpoints that are kept or deleted in any case.
        counts = sum(f.is_whole for f in found) < (rule.last or 0) or rule.best is not None
        if not counts and rule.every is not None and iteration % rule.every == 0:
            continue
        content = _content(directory)
        if content is not None and content.iteration == iteration:
            contents[iteration] = directory, content
            is_whole = counts and not verify.wrong_sizes(directory, content, content.files)
            found.append(FoundCheckpoint(iteration, is_whole, content.validation_loss))
    retired = []
    for iteration in redundant(found, rule, newest=newest):
        directory, content = contents[iteration]
        if foreign := _foreign(directory, content):
            log.warning_once(
                f"foreign {directory}",
                f"{directory} is not deleted: it holds {foreign}, which is no part of it",
            )
            continue
        _delete(directory, content)
        retired.append(iteration)
    return retired


def _latest_first(folder: Place, newest: int) -> list[tuple[int, Place]]:
    """Return every iteration up to `newest` in the folder that it is loaded from."""
    found: dict[int, Place] = {}
    for iteration in deepspeed_iterations(folder):
        found[iteration] = folder / deepspeed_name(iteration)
    for iteration in iterations(folder):  # of both it is this one that is loaded
        found[iteration] = folder / iteration_name(iteration)
    return sorted(((i, place) for i, place in found.items() if i <= newest), reverse=True)


def _content(directory: Place) -> Manifest | None:
    try:
        if isinstance(directory, Path) and not (directory / manifest.NAME).is_file():
            return manifest.load_seal(directory)
        return manifest.load(directory)[0]
    except (CheckpointError, OSError):
        return None


def _foreign(directory: Place, content: Manifest) -> str | None:
    """Return something in a checkpoint's folder that its manifest does not name, or None."""
    if directory.is_symlink():
        return "a link to another place"
    named = {manifest.NAME, manifest.SEAL, *content.files}
    return next((name for name in _files(directory) if name not in named), None)


def _files(directory: Place) -> Iterator[str]:
    """Yield the files of a folder and of its subfolders; an empty subfolder by its name."""
    entries: list[Place] = [*directory.iterdir()]
    for entry in sorted(entries, key=lambda entry: entry.name):
        is_folder = entry.is_dir() and not entry.is_symlink()
        inner: list[Place] = [*entry.iterdir()] if is_folder else []
        yield from sorted(f"{entry.name}/{file.name}" for file in inner)
        if not inner:
            yield entry.name


def _delete(directory: Place, content: Manifest) -> None:
    if isinstance(directory, RemotePath):
        object_folder.delete(directory, content)
        return
    hidden = directory.with_name(f".{directory.name}.removed-{secrets.token_hex(4)}")
    directory.rename(hidden)
    remove(hidden)
