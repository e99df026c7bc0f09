"""The list of checkpoint formats, and the search for the format of a path.

A path is either one checkpoint's own folder, or a folder of several with a tracker file that names
the latest: ours and Megatron's name an iteration (or "release"), DeepSpeed's name a folder.
"""

import re
from pathlib import Path

from megatron import log
from megatron.checkpoint.files.store import Place, place
from megatron.checkpoint.folder import manifest
from megatron.checkpoint.folder import run_folder as folder
from megatron.checkpoint.formats.deepspeed.format import DEEPSPEED, UNIVERSAL
from megatron.checkpoint.formats.deepspeed.save import DEEPSPEED_TRACKER
from megatron.checkpoint.formats.format import Format
from megatron.checkpoint.formats.huggingface.format import FORMAT as HUGGINGFACE
from megatron.checkpoint.formats.megatron.format import FORMAT as MEGATRON
from megatron.checkpoint.formats.native.format import FORMAT as NATIVE
from megatron.checkpoint.formats.torch_dist.format import FORMAT as TORCH_DIST
from megatron.checkpoint.source import CheckpointSource, SourceOptions
from megatron.errors import CheckpointError, ConfigError

# Tried in this order: if two formats recognise a folder, the first one is used.
FORMATS: tuple[Format, ...] = (NATIVE, MEGATRON, TORCH_DIST, UNIVERSAL, DEEPSPEED, HUGGINGFACE)

_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_TRACKER_BYTES = 256
_OURS = re.compile(r"shard-\d{5}-of-.*\.safetensors")


def get(name: str) -> Format:
    """Return the format called `name`; CheckpointError when there is none."""
    for form in FORMATS:
        if form.name == name:
            return form
    raise CheckpointError(
        "there is no such checkpoint format",
        found=repr(name),
        fix=f"use one of {', '.join(form.name for form in FORMATS)}",
    )


def writable() -> tuple[str, ...]:
    """Return the names of the formats that can be written, as well as read."""
    return tuple(form.name for form in FORMATS if form.write is not None)


def recognise(directory: Path) -> Format | None:
    """Return the format of the checkpoint whose own folder is `directory`; None when it is none."""
    if not directory.is_dir():
        return None
    return next((form for form in FORMATS if form.recognise(directory)), None)


def format_of(folder: str | Place, iteration: int | None = None) -> Format:
    """Return the format of the checkpoint that a load of `folder` takes.

    Our own if there is no checkpoint, since our loader then reports what is wrong, and in object
    stores, since other formats are read from disks only.
    """
    root = place(folder)
    if not isinstance(root, Path):
        return NATIVE
    try:
        return recognise(locate(root, iteration)) or NATIVE
    except CheckpointError:
        return NATIVE


def locate(path: str | Path, iteration: int | None = None) -> Path:
    """Return the folder of one checkpoint: `path` itself, or the one in it that its tracker names.

    Raises:
        CheckpointError: there is no such folder or iteration, or nothing in it is recognised.
    """
    path = Path(path)
    # Our tracker decides, whatever else is beside the iterations.
    if iteration is None and not (path / folder.TRACKER).is_file() and recognise(path) is not None:
        return path
    if not path.is_dir() or iteration is not None or (path / folder.TRACKER).is_file():
        return _iteration_folder(path, iteration)
    # Sorted: `latest` of DeepSpeed before `latest_universal`, which is made from it.
    for name in sorted(form.folder_tracker for form in FORMATS if form.folder_tracker):
        if (path / name).is_file():
            return _named_folder(path, name)
    folder.latest_iteration(path)  # raises what is wrong with a folder of ours
    raise unrecognised(path)


def open_source(
    path: str | Path, iteration: int | None = None, *, options: SourceOptions | None = None
) -> CheckpointSource:
    """Open the checkpoint that `locate` finds, whatever its format.

    Raises:
        CheckpointError: as `locate`, or it is incomplete or not what its format promises.
    """
    directory = locate(path, iteration)
    form = recognise(directory)
    if form is None:
        raise unrecognised(directory)
    return form.open_source(directory, options or SourceOptions())


def refuse_overlap(load: Path, save: Path) -> None:
    """Raise ConfigError if writing to `save` could change the checkpoint read from `load`."""
    source, target = load.resolve(), save.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise ConfigError(
            "a checkpoint would be written over, or into, the one that is read",
            found=f"--load {load}, --save {save}",
            fix="give --save a folder of its own",
        )


def unrecognised(directory: Path) -> CheckpointError:
    """Return the error for a folder with a checkpoint of no supported format."""
    names = sorted(entry.name for entry in directory.iterdir())
    if any(_OURS.fullmatch(name) for name in names):
        return manifest.missing(directory)
    return CheckpointError(
        "the folder holds no checkpoint that this program reads",
        found=f"{directory} with {', '.join(names[:5]) or 'nothing in it'}",
        fix="give a folder of one of these formats, copied whole: "
        + ", ".join(form.name for form in FORMATS),
    )


def _iteration_folder(path: Path, iteration: int | None) -> Path:
    if iteration is None and _tracker_text(path / folder.TRACKER) == folder.RELEASE:
        if not (path / folder.RELEASE).is_dir():
            raise CheckpointError(
                "the tracker file names a release checkpoint that is not there",
                found=f"no {folder.RELEASE} beside {path / folder.TRACKER}",
                fix="copy the folder whole, or name an iteration that is there in that file",
            )
        return path / folder.RELEASE
    if (saved := _deepspeed_folder(path, iteration)) is not None:
        return saved
    wanted = folder.latest_iteration(path) if iteration is None else iteration
    directory = path / folder.iteration_name(wanted)
    if not directory.is_dir():
        raise folder.missing_iteration(path, wanted)
    return directory


def _deepspeed_folder(path: Path, iteration: int | None) -> Path | None:
    """Return the folder of an iteration saved in DeepSpeed's layout, or None."""
    text = _tracker_text(path / folder.TRACKER) if iteration is None else str(iteration)
    name = f"global_step{text}"
    is_there = text.isdecimal() and (path / name).is_dir()
    if not is_there or (path / folder.iteration_name(int(text))).is_dir():
        return None
    latest = _tracker_text(path / DEEPSPEED_TRACKER)
    if iteration is None and latest not in ("", name):
        log.warning_once(
            f"trackers of {path}",
            f"{folder.TRACKER} in {path} names iteration {text} and DeepSpeed's `latest` {latest}: "
            f"a save was cut short between the two, or one was edited; {name} is loaded",
        )
    return path / name


def _named_folder(path: Path, tracker: str) -> Path:
    name = _tracker_text(path / tracker)
    if not _FOLDER_NAME.fullmatch(name) or not (path / name).is_dir():
        raise CheckpointError(
            "a tracker file names a folder that is not beside it",
            found=f"{name[:80]!r} in {path / tracker}",
            fix="give the checkpoint's own folder instead of the one that holds the tracker",
        )
    return path / name


def _tracker_text(path: Path) -> str:
    if not path.is_file():
        return ""
    with open(path, "rb") as file:
        return file.read(_TRACKER_BYTES).decode("utf-8", "replace").strip()
