"""Counts floating-point operations and bytes that are alive, as operations make them.

Works on every device, `meta` included. What a reader would get wrong: an operator counts as one
operation, so memory that a kernel needs while it runs is not seen.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import megatron.ops.attention  # noqa: F401  # its operators are counted
from megatron.planning.calls import Phases


class OpMeter(TorchDispatchMode):
    """While active, sums the FLOPs of a phase, and follows the storages that operations make."""

    def __init__(self, phases: Phases) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._phases = phases
        self._flops: Counter[str] = Counter()
        self._held: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._resized: list[int] = []  # storages whose memory comes and goes
        self._live = self._peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count one operation."""
        named = kwargs or {}
        result = function(*args, **named)
        formula = _FORMULAS.get(function._overloadpacket)
        if formula is not None:
            self._flops[self._phases.now] += formula(*args, **named, out_val=result)
        for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._hold(tensor)
        for key in self._resized:
            self._measure(key)
        self._peak = max(self._peak, self._live)
        return result

    def live(self) -> int:
        """Return the bytes that are alive; memory that comes and goes is found here."""
        for key in list(self._held):
            if self._measure(key) and key not in self._resized:
                self._resized.append(key)
        return self._live

    def reading(self) -> tuple[dict[str, int], int]:
        """Return FLOPs by phase and the peak of bytes since the last time, and begin anew."""
        found = dict(self._flops), self._peak
        self._flops.clear()
        self._peak = self.live()
        return found

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._held:
            size = storage.nbytes()
            self._held[key] = weakref.ref(storage, lambda _: self._forget(key)), size
            self._live += size

    def _measure(self, key: int) -> bool:
        """Take over the size of a storage; return whether it has changed."""
        reference, before = self._held[key]
        storage = reference()
        now = before if storage is None else storage.nbytes()
        self._held[key] = reference, now
        self._live += now - before
        return now != before

    def _forget(self, key: int) -> None:
        self._live -= self._held.pop(key)[1]
        if key in self._resized:
            self._resized.remove(key)


def _attention_flops(q: Sequence[int], k: Sequence[int], *_: object, **__: object) -> int:
    """Return those of scores and of weighted values, masked or not."""
    b, heads, length, width = q
    return 2 * 2 * b * heads * length * k[2] * width


def _grouped_flops(one: Sequence[int], other: Sequence[int], *_: object, **__: object) -> int:
    # [n, k] times [groups, k, m], or of gradients [k, n] times [n, m] in groups of n.
    return 2 * one[0] * one[1] * other[-1]


def _gradient_flops(_: Sequence[int], q: Sequence[int], k: Sequence[int], *__: object) -> int:
    """Return twice those of forward: scores that a kernel computes again do not count."""
    return 2 * _attention_flops(q, k)


def _of_shapes(formula: Callable[..., int]) -> Callable[..., int]:
    def of_tensors(*args: Any, **_: Any) -> int:
        return formula(*(tuple(arg.shape) for arg in args if isinstance(arg, Tensor)))

    return of_tensors


_ATEN = torch.ops.aten
_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.megatron.attention: _of_shapes(_attention_flops),
    torch.ops.megatron.attention_backward: _of_shapes(_gradient_flops),
    _ATEN._grouped_mm: _of_shapes(_grouped_flops),
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _of_shapes(_attention_flops),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _of_shapes(_gradient_flops),
}
