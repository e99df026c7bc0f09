"""Named ranges of a profiler's trace; where no profiler records, each is a check and nothing else.

A communication lasts until its result is there, which may be long after the call: on a CPU its end
is noted by the thread that carries it. What a reader would get wrong: on a GPU the range of the
host ends with the call, and the profiler adds one of the same name over its kernels.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

Begun = record_function | None  # an open range, if a profiler records
Range = AbstractContextManager[Begun]

WAIT = "wait for communication"  # in which nothing is computed
_NOTHING: Range = nullcontext()
_NAME = re.compile(r"(?P<group>\w+) (?P<operation>\w+), (?P<bytes>\d+) bytes")


class Communication(NamedTuple):
    """What the name of a communication says: a field of `ParallelContext`, and what is sent."""

    group: str
    operation: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.group} {self.operation}, {self.bytes} bytes"

    @classmethod
    def read(cls, name: str) -> "Communication | None":
        """Return the communication that a range is called after; None for all other ranges."""
        found = _NAME.fullmatch(name)
        return found and cls(found["group"], found["operation"], int(found["bytes"]))


def is_recording() -> bool:
    """Return whether a profiler records in this process."""
    return torch._C._autograd._profiler_enabled()


def span(name: str | Callable[[], str]) -> Range:
    """Return a range for a `with` block.

    Args:
        name: or what makes it, where that takes time.
    """
    if not is_recording():
        return _NOTHING
    return record_function(name if isinstance(name, str) else name())


def communication(group: str, operation: str, *sent: Tensor) -> Range:
    """Return the range of a communication for the block that starts it.

    Args:
        group: its name.
        operation: what is after a parenthesis is left out.
        sent: what this rank gives to it.
    """
    if not is_recording():
        return _NOTHING
    size = sum(tensor.numel() * tensor.itemsize for tensor in sent)
    return record_function(str(Communication(group, operation.partition("(")[0], size)))


def last_until(begun: Begun, end: torch.futures.Future[object]) -> None:
    """Let a range that is open, if there is one, last until `end` rather than its block's end."""
    if begun is not None:
        begun._call_end_callbacks_on_future(end)  # type: ignore[no-untyped-call]
