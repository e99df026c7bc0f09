"""Finds what a step does beside its device: values that the host reads, tensors of another device.

A step on `meta`, whose tensors have no values, passes through here operation by operation. A
violation is an error that names the operation and the line of our code that called it; where torch
calls it in a backward pass, the line that started the pass.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron import device

ROOT = Path(__file__).resolve().parents[2]
_OURS = (
    *("megatron/", "pretrain_gpt.py", "pretrain_bert.py", "pretrain_prefix_lm.py"),
    *("pretrain_t5.py", "pretrain_ict.py", "pretrain_vit.py"),
)
_ATEN = torch.ops.aten

# Operations whose results the host has to know before it can go on: values, or a shape that depends
# on values.
READS: Mapping[Any, str] = {
    _ATEN._local_scalar_dense: "the host reads a value (item, float, int, bool)",
    _ATEN.equal: "the host reads whether tensors are equal",
    _ATEN.nonzero: "the shape of the result depends on values",
    _ATEN.masked_select: "the shape of the result depends on values",
    _ATEN._unique2: "the shape of the result depends on values",
    _ATEN.unique_dim: "the shape of the result depends on values",
    _ATEN.unique_consecutive: "the shape of the result depends on values",
    _ATEN.bincount: "the shape of the result depends on values",
    _ATEN.repeat_interleave: "the shape of the result depends on values",
}
_COPIES = (_ATEN._to_copy, _ATEN.copy_)
# They copy values of the host to a device without an operation that a dispatch mode sees.
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)

# Where a step waits for values by design, as docs/architecture.md says: file, function, reason.
ALLOWED: Mapping[tuple[str, str], str] = {
    ("megatron/pipeline/executor.py", "Executor._communicate"): "headers, once for each message",
    ("megatron/pipeline/executor.py", "Executor._header"): "they are made of numbers of the host",
    ("megatron/model/experts/mixture.py", "RowGroups.sizes"): "sizes of the experts' matrices",
    ("megatron/model/experts/mixture.py", "gather_counts"): "rows that ranks send to each other",
    ("megatron/model/experts/mixture.py", "dispatch_plan"): "arithmetic on the host with those",
    ("megatron/model/experts/mixture.py", "GroupedLinear.forward"): "rows of groups, from those",
    ("megatron/model/experts/balance.py", "sinkhorn"): "whether its rounds have converged",
}
_VALUES = ("megatron/device.py", "values_for_host")  # what those call
_values_for_host = device.values_for_host


class DeviceViolationError(AssertionError):
    """An operation of a step that waits for the device, or does not run there."""


class DeviceGuard(TorchDispatchMode):
    """While active, an operation that reads values of `meta`, or mixes devices, is an error.

    Args:
        allowed: functions of our code that may, or whose values `values_for_host` returns.
    """

    def __init__(self, allowed: Mapping[tuple[str, str], str] = ALLOWED) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allowed = allowed
        self.used: set[tuple[str, str]] = set()  # of the allowed ones
        self.operations = 0
        self._others = ExitStack()  # what no dispatch mode sees

    def __enter__(self) -> "DeviceGuard":
        """Start to check."""
        self._others.enter_context(_MakerGuard(self._check_maker))
        self._others.enter_context(patch.object(device, "values_for_host", self._values_for_host))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End to check."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._others.close()

    def _check_maker(self, function: Any, result: Any) -> None:
        if isinstance(result, Tensor) and result.is_meta:
            name = getattr(function, "__name__", function)
            self._report(name, "a copy from the host, which is waited for")

    def _values_for_host(self, tensor: Tensor, what: str) -> Tensor:
        self._report("device.values_for_host", f"the host reads {what}")
        return _values_for_host(tensor, what)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Check one operation before it runs, and the device of its results after."""
        named = kwargs or {}
        self.operations += 1
        given = [one for one in tree_leaves((args, named)) if isinstance(one, Tensor)]
        problem = _reads(function, given, named) or _mixes(given)
        if problem is not None:
            self._report(function, problem)
        result = function(*args, **named)
        if problem is None and any(map(_is_elsewhere, tree_leaves(result))):
            self._report(function, "it makes a tensor that is not on the device of the step")
        return result

    def _report(self, function: Any, problem: str) -> None:
        frames = list(_frames_of_ours())
        places = [(path, name) for path, _, name in frames]
        callers = places[:1]
        if _VALUES in places:
            callers += places[places.index(_VALUES) + 1 :][:1]
        reader = next((place for place in callers if place in self._allowed), None)
        if reader is not None:
            self.used.add(reader)
            return
        where = "no line of ours"
        if frames:
            path, line, name = frames[0]
            where = f"{path}:{line} in {name}"
        raise DeviceViolationError(f"{function} at {where}: {problem}")


class _MakerGuard(TorchFunctionMode):
    """Shows every function that makes a tensor of values of the host, after it was called."""

    def __init__(self, check: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _MAKERS:
            self._check(function, result)
        return result


def _reads(function: Any, given: list[Tensor], named: Mapping[str, Any]) -> str | None:
    packet = function._overloadpacket
    of_device = [tensor for tensor in given if tensor.is_meta]
    if packet in READS and of_device:
        return READS[packet]
    if packet is _ATEN.index and any(tensor.dtype in _MASKS for tensor in of_device[1:]):
        return "the shape of the result depends on a mask"
    if packet in _COPIES:
        source = given[-1]
        wanted = named.get("device")
        target = given[0].device if len(given) > 1 else wanted and torch.device(wanted)
        if target is not None and target.type != source.device.type:
            way = "to the host" if source.is_meta else "from the host"
            return f"a copy {way}, which is waited for"
    return None


_MASKS = (torch.bool, torch.uint8)


def _mixes(given: list[Tensor]) -> str | None:
    """Numbers of the host are arguments of kernels, and no tensors."""
    if any(map(_is_elsewhere, given)):
        return "it takes a tensor that is not on the device of the step"
    return None


def _is_elsewhere(one: object) -> bool:
    return isinstance(one, Tensor) and not one.is_meta and one.dim() > 0


def _frames_of_ours() -> Iterator[tuple[str, int, str]]:
    """Yield file, line and function of our code on the stack, the innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT)):
            relative = Path(path).relative_to(ROOT).as_posix()
            if relative.startswith(_OURS):
                yield relative, frame.f_lineno, frame.f_code.co_qualname
        frame = frame.f_back  # type: ignore[assignment]
