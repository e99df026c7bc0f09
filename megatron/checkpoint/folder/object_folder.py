"""A folder of checkpoints in a store of objects, where nothing can be renamed.

    RUN/iter_0000100/shard-00000-of-00002.1f3a5c7e.safetensors   written first, under a new name
    RUN/iter_0000100/manifest.json                               put at once: now it is a checkpoint
    RUN/latest_checkpointed_iteration.txt                        put at once, last of all

Objects that no manifest names were left by an interrupted save. `run_folder` decides what is done,
on a disk or here; one job at a time saves to a folder.
"""

import re
import secrets
from collections.abc import Iterator

from megatron import log
from megatron.checkpoint.files.store import RemotePath, write_object
from megatron.checkpoint.folder import manifest
from megatron.checkpoint.folder.manifest import Manifest
from megatron.errors import CheckpointError

_PART = re.compile(r"[A-Za-z0-9_-]+\.([0-9a-f]{8})\.safetensors")
_PART_NAME = re.compile(r"(iter_\d{7,})/([^/]+)")


def sweep(folder: RemotePath) -> None:
    """Remove parts that no manifest names, by exact names only."""
    below: dict[str, set[str]] = {}
    for name in folder.find():
        if match := _PART_NAME.fullmatch(name):
            below.setdefault(match[1], set()).add(match[2])
    for directory, names in below.items():
        saves = {match[1] for name in names if (match := _PART.fullmatch(name))}
        if manifest.NAME in names and len(saves) == 1:
            continue  # all of one save, which was finished: its manifest need not be read
        iteration_folder = folder / directory
        for part in _unnamed(iteration_folder, _content(iteration_folder)):
            log.info(f"removing what a save that was cut short left behind: {part}")
            part.unlink(missing_ok=True)


def make_stage(folder: RemotePath, name: str) -> RemotePath:
    """Return the place for the parts of a new save.

    Its parts have names of their own, so those of an earlier save of the iteration stay readable.
    """
    return RemotePath(folder.scheme, f"{folder.key}/{name}", folder.fs, secrets.token_hex(4))


def commit(stage: RemotePath, tracker: RemotePath, iteration: int) -> RemotePath:
    """Set the tracker to a checkpoint with a manifest, and remove the parts of its predecessor."""
    write_object(tracker, f"{iteration}\n".encode())
    directory = RemotePath(stage.scheme, stage.key, stage.fs)
    try:
        for part in _unnamed(directory, _content(directory)):
            part.unlink(missing_ok=True)
    except OSError as error:  # the next save tries again
        log.warning(f"parts of a former checkpoint are left in {directory}: {error}")
    return directory


def discard(stage: RemotePath) -> None:
    """Remove the parts of a save that failed, unless its manifest was written."""
    assert stage.token is not None  # noqa: S101  # invariant: made by make_stage
    directory = RemotePath(stage.scheme, stage.key, stage.fs)
    try:
        content = _content(directory)
        for part in _unnamed(directory, content):
            if f".{stage.token}." in part.name:
                part.unlink(missing_ok=True)
    except OSError as error:
        log.warning(f"{directory} could not be cleaned up ({error}); the next save tries again")


def delete(directory: RemotePath, content: Manifest) -> None:
    """Delete a checkpoint: first the manifest, then its parts."""
    (directory / manifest.NAME).unlink()
    for name in content.files:
        (directory / name).unlink(missing_ok=True)


def probe(folder: RemotePath) -> None:
    """Write a small object, read it back, list it, replace it and delete it.

    Raises:
        OSError: one of these does not work.
    """
    object_ = folder / f".probe-{secrets.token_hex(8)}"
    write_object(object_, b"probe")
    try:
        if object_.read_bytes() != b"probe":
            raise OSError(5, "an object is not what was just written to it", str(object_))
        if object_.name not in [found.name for found in folder.iterdir()]:
            raise OSError(5, "an object that was just written is not listed", str(object_))
        write_object(object_, b"probe again")  # as every save replaces the tracker
        if object_.read_bytes() != b"probe again":
            raise OSError(5, "an object that was just replaced is read as it was", str(object_))
    finally:
        object_.unlink(missing_ok=True)


def _unnamed(directory: RemotePath, content: Manifest | None) -> Iterator[RemotePath]:
    named = () if content is None else content.files
    for entry in directory.iterdir():
        if _PART.fullmatch(entry.name) and entry.name not in named:
            yield entry


def _content(directory: RemotePath) -> Manifest | None:
    """Return the content of the manifest; None when there is none.

    Raises:
        OSError: it cannot be read, or is damaged: nothing may be deleted then.
    """
    if not (directory / manifest.NAME).is_file():
        return None
    try:
        return manifest.load(directory)[0]
    except CheckpointError as error:
        raise OSError(5, error.problem, str(directory / manifest.NAME)) from error
