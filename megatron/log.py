"""Rank-aware logging: the only place in the library that writes to the terminal.

What every rank would say alike is said once, by rank 0 (`info`, `warning`); the step line is said
by the last rank, as in Megatron (`last_rank`); what only one rank knows is said by that rank with
its number in front (`error`). Standard output carries progress, standard error carries trouble.
"""

import sys
from dataclasses import dataclass, field
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(slots=True)
class _Speaker:
    """Who this process is, as far as logging is concerned."""

    rank: int = 0
    world_size: int = 1
    level: int = LEVELS.index("info")
    replica_level: int = LEVELS.index("error")
    said: set[str] = field(default_factory=set)

    def hears(self, level: str) -> bool:
        return LEVELS.index(level) >= self.level


_SPEAKER = _Speaker()


def configure(
    rank: int, world_size: int, *, level: str = "info", replica_level: str = "error"
) -> None:
    """Say who this process is, and from which level on rank 0 and the other ranks speak."""
    _SPEAKER.rank, _SPEAKER.world_size = rank, world_size
    _SPEAKER.level, _SPEAKER.replica_level = LEVELS.index(level), LEVELS.index(replica_level)


def is_rank_zero() -> bool:
    """Whether this process speaks for the whole job."""
    return _SPEAKER.rank == 0


def debug(message: str) -> None:
    """Print `message` on rank 0 when the level asks for it."""
    _say("debug", message)


def info(message: str) -> None:
    """Print `message` once for the whole job, on rank 0."""
    _say("info", message)


def last_rank(message: str) -> None:
    """Print `message` on the last rank, which is the one that knows the loss under pipelines."""
    if _SPEAKER.rank == _SPEAKER.world_size - 1 and _SPEAKER.hears("info"):
        _write(message, sys.stdout)


def warning(message: str) -> None:
    """Print a warning once for the whole job, on rank 0, to standard error."""
    _say("warning", f"WARNING: {message}")


def warning_once(key: str, message: str) -> None:
    """Like `warning`, but only the first time in this process for the same `key`."""
    if key not in _SPEAKER.said:
        _SPEAKER.said.add(key)
        warning(message)


def error(message: str) -> None:
    """Print `message` from whichever rank calls, with the rank's number in front."""
    prefix = f"[rank {_SPEAKER.rank}] " if _SPEAKER.world_size > 1 else ""
    _write(f"{prefix}ERROR: {message}", sys.stderr)


def _say(level: str, message: str) -> None:
    if _SPEAKER.rank == 0:
        if _SPEAKER.hears(level):
            _write(message, sys.stderr if level == "warning" else sys.stdout)
    elif LEVELS.index(level) >= _SPEAKER.replica_level:
        _write(f"[rank {_SPEAKER.rank}] {message}", sys.stderr)


def _write(message: str, stream: TextIO) -> None:
    # One write for the line and its end: ranks share a terminal, and would end up on one line.
    stream.write(message + "\n")
    stream.flush()
