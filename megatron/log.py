"""Rank-aware logging: the only place in the library that writes to the terminal.

Rank 0 prints messages that are equal on every rank (`info`, `warning`). The last rank prints the
progress of the steps, as in Megatron (`last_rank`). The rank that calls `error` prints it, with its
number. Standard output carries progress, standard error carries trouble.

Records go through the logger `megatron` of the standard `logging` module, without hidden values. A
handler added to it receives what this rank prints, with the attribute `rank`; the root logger none.
"""

import logging
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error", "critical")
REDACTED = "(redacted)"
_ERASE_LINE = "\r\x1b[K"


@dataclass(slots=True)
class _Output:
    """The rank of this process, the warnings it has printed, and what it must not print."""

    rank: int = 0
    world_size: int = 1
    warned: set[str] = field(default_factory=set)
    secrets: set[str] = field(default_factory=set)
    bars: int = 0  # progress bars on this process's terminal, drawn by this rank or another


_OUTPUT = _Output()


class _Terminal(logging.Handler):
    """A handler that writes a record with its time, and rank and level where they matter."""

    def format(self, record: logging.LogRecord) -> str:
        rank: int = getattr(record, "rank", _OUTPUT.rank)
        is_error = record.levelno >= logging.ERROR
        is_named = _OUTPUT.world_size > 1 and is_error
        is_named |= rank != 0 and record.name == _RANK.name
        time = logging.Formatter().formatTime(record, "%Y-%m-%d %H:%M:%S")
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        return f"{time} {f'[rank {rank}] ' if is_named else ''}{level}{record.getMessage()}"

    def emit(self, record: logging.LogRecord) -> None:
        is_progress = record.levelno < logging.WARNING and (
            record.name == _STEPS.name or _OUTPUT.rank == 0
        )
        # Looked up for every record: programs redirect standard output. An error of writing is not
        # caught: a run whose output cannot be written must not go on without it.
        _write(self.format(record), sys.stdout if is_progress else sys.stderr)


_RANK = logging.getLogger("megatron")
_STEPS = logging.getLogger("megatron.steps")  # printed by the last rank
_RANK.addHandler(_Terminal())
_RANK.propagate = False


def configure(
    rank: int, world_size: int, *, level: str = "info", replica_level: str = "error"
) -> None:
    """Set the rank of this process, and the lowest level that rank 0 and the other ranks print."""
    _OUTPUT.rank, _OUTPUT.world_size = rank, world_size
    own = level if rank == 0 else replica_level
    _RANK.setLevel(min(_number(own), logging.ERROR))  # errors are always printed
    # above every level on all ranks but the last
    _STEPS.setLevel(_number(level) if rank == world_size - 1 else logging.CRITICAL + 1)


def hide(secrets: Iterable[str]) -> None:
    """Replace these texts in all messages from now on."""
    _OUTPUT.secrets.update(secret for secret in secrets if secret)


def masked(text: str) -> str:
    """Return `text` without the texts given to `hide`."""
    if not _OUTPUT.secrets:
        return text
    longest_first = sorted(_OUTPUT.secrets, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), REDACTED, text)


def is_rank_zero() -> bool:
    """Return whether this process prints for the whole job."""
    return _OUTPUT.rank == 0


def debug(message: str) -> None:
    """Print `message` on rank 0 when the level asks for it."""
    _log(_RANK, logging.DEBUG, message)


def info(message: str) -> None:
    """Print `message` once for the whole job, on rank 0."""
    _log(_RANK, logging.INFO, message)


def last_rank(message: str) -> None:
    """Print `message` on the last rank, which has the loss under pipelines.

    The time stands before the first line only, so lines that scripts parse come after it.
    """
    _log(_STEPS, logging.INFO, message)


def warning(message: str) -> None:
    """Print a warning once for the whole job, on rank 0, to standard error."""
    _log(_RANK, logging.WARNING, message)


def warning_once(key: str, message: str) -> None:
    """Print a warning as `warning` does, but only once per `key` in this process."""
    if key not in _OUTPUT.warned:
        _OUTPUT.warned.add(key)
        warning(message)


def error(message: str) -> None:
    """Print `message` on the calling rank, with the rank's number in front."""
    _log(_RANK, logging.ERROR, message)


class ProgressBar:
    """Progress with the remaining time, drawn on standard error by the last rank.

    Nothing is drawn where standard error is not a terminal, or where `last_rank` prints nothing.
    """

    def __init__(self, total: int, done: int) -> None:
        self._bar: Any = None
        self._is_open = sys.stderr.isatty()
        _OUTPUT.bars += self._is_open
        if self._is_open and _STEPS.isEnabledFor(logging.INFO):
            from tqdm import tqdm  # programs that draw no bar do not import it

            self._bar = tqdm(total=total, initial=done, unit=" steps", dynamic_ncols=True)

    def update(self, done: int) -> None:
        """Draw that `done` steps of the total are done."""
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """End the bar's line and leave it as it is."""
        if self._bar is not None:
            self._bar.close()
        _OUTPUT.bars -= self._is_open
        self._is_open = False


def _number(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


def _log(logger: logging.Logger, level: int, message: str) -> None:
    logger.log(level, masked(message), extra={"rank": _OUTPUT.rank})


def _write(message: str, stream: TextIO) -> None:
    if _OUTPUT.bars:  # the bar is drawn anew, below the message, when it moves next
        sys.stderr.write(_ERASE_LINE)
        sys.stderr.flush()
    # One write for the line and its end: ranks share a terminal, and would end up on one line.
    stream.write(message + "\n")
    stream.flush()


configure(0, 1)
