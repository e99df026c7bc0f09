"""What the launcher told this process: who it is among how many, and where to meet the others.

This module and `initialize.py` are the only readers of `os.environ`. It imports no torch, so that
errors of a command line can be printed by one rank only, at once.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Launch:
    """One process among those that were started together."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    has_rendezvous: bool = False  # whether a launcher said where the ranks meet


def launch_from_environment(environment: Mapping[str, str] | None = None) -> Launch:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them.

    Raises:
        ConfigError: if only some of them are set, or they are not consistent numbers.
    """
    given = os.environ if environment is None else environment
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return Launch()
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in given]
    if missing:
        raise ConfigError(
            "the launcher set only part of what ranks need to find each other",
            found="no " + ", no ".join(missing),
            fix="start with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
            "MASTER_PORT",
        )
    rank, world_size = _number(given, "RANK"), _number(given, "WORLD_SIZE")
    local_rank = _number(given, "LOCAL_RANK", rank)
    local_world_size = _number(given, "LOCAL_WORLD_SIZE", world_size)
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size):
        raise ConfigError(
            "the launcher's numbers contradict each other",
            found=f"RANK={rank} WORLD_SIZE={world_size} LOCAL_RANK={local_rank} "
            f"LOCAL_WORLD_SIZE={local_world_size}",
            fix="let torchrun set them; unset any that were exported by hand",
        )
    return Launch(rank, world_size, local_rank, local_world_size, has_rendezvous=True)


def _number(given: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = given.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(
            "the launcher set something that is not a number",
            found=f"{name}={text}",
            fix="let torchrun set it; unset it if it was exported by hand",
        ) from None
