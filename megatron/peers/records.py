"""What ranks write into the store for each other, as JSON, and how it is read.

A thread that watches the store must not end by what somebody else wrote there, so nonsense is a
record too: a sign of life that is none, and the failure of nobody.
"""

import json
from typing import NamedTuple

from megatron.peers.stacks import ProcessName

LONGEST_MESSAGE = 4000
_LONGEST_RECORD = 12 * LONGEST_MESSAGE + 1000  # JSON writes a character in up to 12 bytes
_SHOWN_OF_NONSENSE = 80
NOBODY = -1
_WRONG = (ValueError, TypeError, KeyError, RecursionError)


class Failure(NamedTuple):
    """A rank that failed or has stopped, and what there is to say of it.

    Attributes:
        by: the rank that wrote this.
        process: what has to be ended, where a rank cannot do that itself.
    """

    rank: int
    message: str
    by: int
    process: ProcessName | None = None

    @property
    def name(self) -> str:
        """The rank in a message."""
        return f"rank {self.rank}" if self.rank >= 0 else "another rank"

    def encode(self) -> str:
        """Return it as JSON."""
        return json.dumps(self._replace(message=self.message[:LONGEST_MESSAGE])._asdict())

    @classmethod
    def parse(cls, record: bytes) -> "Failure":
        """Read what a rank wrote; other content is the failure of `NOBODY`."""
        try:
            if len(record) > _LONGEST_RECORD:
                raise ValueError(f"{len(record):,} bytes")
            fields = json.loads(record)
            rank, message, by = fields["rank"], fields["message"], fields["by"]
            is_number = type(rank) is int and type(by) is int
            if not is_number or rank < 0 or type(message) is not str:
                raise ValueError("no rank, or no message")
            process = _process(fields["process"]) if fields["process"] is not None else None
        except _WRONG as error:
            shown = f"{type(error).__name__}: {error}; {record[:_SHOWN_OF_NONSENSE]!r}"
            return cls(NOBODY, f"its record cannot be read: {shown}", NOBODY)
        # Without control characters, which would write elsewhere on a terminal.
        printable = (c if c.isprintable() or c in "\n\t" else "?" for c in message)
        return cls(rank, "".join(printable)[:LONGEST_MESSAGE], by, process)


class Beat(NamedTuple):
    """A sign of life of one rank."""

    number: int
    section: str
    iteration: int
    limit_s: float  # when its own steps would be too long
    process: ProcessName

    def encode(self) -> str:
        """Return it as JSON."""
        return json.dumps(self)

    @classmethod
    def parse(cls, record: bytes) -> "Beat | None":
        """Read what a rank wrote; None where that is no sign of life."""
        try:
            number, section, iteration, limit_s, process = json.loads(record[:_LONGEST_RECORD])
            return cls(int(number), str(section), int(iteration), float(limit_s), _process(process))
        except (*_WRONG, OverflowError):
            return None


def _process(fields: object) -> ProcessName:
    if not isinstance(fields, list):
        raise TypeError("no process")
    host, pid, started = fields
    if type(host) is not str or type(pid) is not int or type(started) is not int:
        raise TypeError("no process")
    return ProcessName(host, pid, started)
