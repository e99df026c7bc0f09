"""A captured call on a CPU: the operations of a call, recorded and done again without its code.

Stands in for `device.CapturedCall`: numbers of the host are what they were, every tensor is where
it was, and no line of Python runs again. What reads a value, as no graph can, is not found here, as
checks on CPUs do; steps on `meta` find it (tests/laws/layouts/test_host_reads.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron import device

Result = TypeVar("Result")
_wait = dist.Work.wait
_EMPTY = (torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.new_empty)


class _Operation(NamedTuple):
    function: Any
    args: Any
    kwargs: Any
    results: list[Tensor]  # in memory that no argument has


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self._waits = False

    def wait(self, work: dist.Work, *timeout: Any) -> Any:
        """Wait for communication, of which gloo does a part only then: a replay waits too."""
        self._waits = True
        try:
            return _wait(work, *timeout)
        finally:
            self._waits = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        result = function(*args, **named)
        if not self._waits:
            # Memory of undefined content is filled by other operations.
            is_empty = function._overloadpacket in _EMPTY
            made = [] if is_empty else _made(result, (args, named))
            self.operations.append(_Operation(function, args, named, made))
        return result


class RecordedCall(Generic[Result]):
    """See `device.CapturedCall`."""

    made = 0

    def __init__(self, call: Callable[[], Result]) -> None:
        RecordedCall.made += 1
        recorder = _Recorder()

        def wait(work: dist.Work, *timeout: Any) -> Any:
            return recorder.wait(work, *timeout)

        with recorder, patch.object(dist.Work, "wait", wait):
            self.result = call()
        self._operations = recorder.operations
        # A capture does not compute; this one has, with the inputs of the first replay.
        self._is_done = True

    def replay(self) -> None:
        """Do all operations again."""
        if self._is_done:
            self._is_done = False
            return
        under_way: list[Any] = []
        with torch.no_grad():
            for function, args, kwargs, results in self._operations:
                if function.namespace != "c10d":
                    while under_way:
                        under_way.pop().wait()
                found = function(*args, **kwargs)
                if results:
                    for kept, new in zip(results, _made(found, (args, kwargs)), strict=True):
                        kept.copy_(new)
                under_way += [one for one in tree_leaves(found) if hasattr(one, "wait")]
        while under_way:
            under_way.pop().wait()


@contextmanager
def captured_by_recording() -> Iterator[None]:
    """Let steps on a CPU be captured inside the block."""
    with (
        patch.object(device, "can_capture", lambda: True),
        patch.object(device, "CapturedCall", RecordedCall),
    ):
        yield


def _made(result: Any, given: Any) -> list[Tensor]:
    """Return the tensors of a result that share no memory with what was given."""
    taken = set(map(_memory, _tensors(given)))
    return [one for one in _tensors(result) if _memory(one) not in taken]


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (one for one in tree_leaves(tree) if isinstance(one, Tensor))


def _memory(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata
