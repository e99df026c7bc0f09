"""How many bytes of each memory may be used: what is free, or less where `--max-memory` says so."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron import device, host
from megatron.checkpoint.files.durable import from_os_error
from megatron.errors import ConfigError, MachineError
from megatron.host import in_gib
from megatron.inference.offload.placement import DISK, Memory

_UNITS = {"B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("iB", 1024), ("B", 1000))
}
_LIMIT = re.compile(r"([a-z][a-z0-9:]*)=(\d+(?:\.\d+)?)([KMGT]?i?B)")


def parse_max_memory(words: Sequence[str]) -> dict[str, int]:
    """Return the bytes of each memory that words such as `cpu=4GiB` and `cuda:0=20GB` name.

    Raises:
        ConfigError: a word is not of this form, or two are of one memory.
    """
    limits: dict[str, int] = {}
    for word in words:
        matched = _LIMIT.fullmatch(word)
        if matched is None or matched[3] not in _UNITS:
            raise ConfigError(
                "a limit of memory cannot be read",
                found=f"--max-memory {word}",
                fix=f"write it as cpu=4GiB or cuda:0=20GB, with one of {', '.join(_UNITS)}",
            )
        if matched[1] in limits:
            raise ConfigError(
                "a memory has two limits",
                found=f"--max-memory {' '.join(words)}",
                fix=f"name {matched[1]} once",
            )
        limits[matched[1]] = int(float(matched[2]) * _UNITS[matched[3]])
    return limits


def usable_memories(limits: Mapping[str, int], folder: Path | None) -> tuple[Memory, ...]:
    """Return the memories of this process: its device first, the disk of `folder` last.

    Args:
        limits: by the name of a memory.
        folder: the offload folder, which may not exist yet; without one nothing can be written.

    Raises:
        ConfigError: a limit of a memory that is not there, or of which it is unknown how much is
            free.
        MachineError: less is free than a limit allows.
    """
    free = device.free_memories() | {DISK: 0 if folder is None else _free_on_disk(folder)}
    unknown = sorted(limits.keys() - free.keys())
    if unknown:
        raise ConfigError(
            "a limit is of a memory that this process does not have",
            found=f"--max-memory {unknown[0]}={limits[unknown[0]]}B",
            fix=f"use names among {', '.join(free)}",
        )
    if DISK in limits and folder is None:
        raise ConfigError(
            "a limit of the disk has no effect without a folder to write to",
            found=f"--max-memory {DISK}={limits[DISK]}B, and no --offload-folder",
            fix="add --offload-folder FOLDER",
        )
    return tuple(Memory(name, _usable(name, size, limits.get(name))) for name, size in free.items())


def _usable(name: str, free: int | None, limit: int | None) -> int:
    if limit is None and free is None:
        raise ConfigError(
            "how much memory is free is unknown on this system",
            found=f"no figure of {name}",
            fix=f"say how much may be used: --max-memory {name}=8GiB",
        )
    if limit is None or (free is not None and free < limit):
        if limit is not None:
            raise MachineError(
                "less memory is free than may be used",
                found=f"--max-memory {name} of {in_gib(limit)}, {in_gib(free or 0)} are free",
                fix="free memory, or leave the limit out: then what is free is used",
            )
        return free or 0
    return limit


def _free_on_disk(folder: Path) -> int:
    """Return the free bytes of the disk that a folder is on, or would be on."""
    present = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        return host.free_bytes(present)
    except OSError as error:
        raise from_os_error(error, "looking at the offload folder") from error
