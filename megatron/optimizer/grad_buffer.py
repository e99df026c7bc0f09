"""Contiguous gradient buffers over a module's parameters, and their sum over data-parallel ranks.

Every trainable parameter gets `main_grad`, a view into one flat tensor per gradient dtype. Where
the dtypes agree `grad` *is* that view, and autograd adds into it; a half-precision parameter with
wider gradients has each new `grad` added into `main_grad` by a hook and thrown away. Never set
`grad` to None on these parameters: call `zero` instead.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.errors import ConfigError
from megatron.mpu.context import Group

HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
BUCKET_ELEMENTS = 40_000_000  # Megatron's default: large enough to use the network, small enough
# to start on one while others are still being computed
_ALIGN_ELEMENTS = 64  # 128 bytes or more, for vectorised kernels at the start of every parameter
_NAMES_SHOWN = 5


class GradBuffer:
    """The gradients of some parameters: where they are kept, zeroed, summed and scaled.

    Args:
        gradient_dtype: in which the gradients of half-precision parameters are kept; the others'
            are kept in the parameter's own dtype.
        optional: names of parameters that may go without a gradient in an iteration.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        *,
        gradient_dtype: torch.dtype,
        optional: Collection[str] = (),
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        self._names = {
            parameter: name for name, parameter in named_parameters if parameter.requires_grad
        }
        self._optional = frozenset(optional)
        self._arrived: set[Parameter] = set()
        by_kind: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
        for parameter in self._names:
            dtype = gradient_dtype if parameter.dtype in HALF_DTYPES else parameter.dtype
            by_kind.setdefault((dtype, parameter.device), []).append(parameter)
        self._flats = [
            _flatten(parameters, dtype=dtype, bucket_elements=bucket_elements)
            for (dtype, _), parameters in by_kind.items()
        ]
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
        self.zero()

    @property
    def size_bytes(self) -> int:
        """Memory that the gradients take, padding included."""
        return sum(flat.data.numel() * flat.data.element_size() for flat in self._flats)

    def zero(self) -> None:
        """Set every gradient to zero, before the first backward pass of an iteration."""
        for flat in self._flats:
            flat.data.zero_()
        for parameter in self._names:
            view = parameter.main_grad  # type: ignore[attr-defined]  # set by _flatten
            parameter.grad = view if view.dtype == parameter.dtype else None
        self._arrived.clear()

    def all_reduce(self, group: Group) -> None:
        """Sum the gradients over `group`, once all backward passes of the iteration are done.

        Raises:
            ConfigError: a parameter has had no gradient since `zero`, and is not optional.
        """
        self._check_all_arrived()
        if group.size == 1:
            return
        pending = [
            dist.all_reduce(flat.data[bucket.start : bucket.end], group=group.handle, async_op=True)
            for flat in self._flats
            for bucket in flat.buckets
        ]
        for work in pending:
            assert work is not None  # noqa: S101  # invariant: this rank is in its own group
            work.wait()

    def scale_(self, factor: float) -> None:
        """Multiply every gradient by `factor`."""
        for flat in self._flats:
            flat.data.mul_(factor)

    def _take(self, parameter: Parameter) -> None:
        self._arrived.add(parameter)
        view: Tensor = parameter.main_grad  # type: ignore[attr-defined]  # set by _flatten
        if parameter.grad is not None and view.dtype != parameter.dtype:
            view.add_(parameter.grad)
            parameter.grad = None

    def _check_all_arrived(self) -> None:
        missing = [
            name
            for parameter, name in self._names.items()
            if parameter not in self._arrived and name not in self._optional
        ]
        if missing:
            more = len(missing) - _NAMES_SHOWN
            raise ConfigError(
                "some parameters took no part in the backward pass",
                found=", ".join(missing[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else ""),
                fix="use them in the loss, give them requires_grad=False, or name them as optional",
            )


class Bucket(NamedTuple):
    """A stretch of whole parameters of a flat buffer that is reduced in one collective."""

    start: int
    end: int
    parameters: tuple[Parameter, ...]  # it may be reduced once these all have their gradients


@dataclass(frozen=True, slots=True)
class _Flat:
    data: Tensor  # [elements], in which parameters lie in reverse order of registration
    buckets: tuple[Bucket, ...]


def _flatten(parameters: Sequence[Parameter], *, dtype: torch.dtype, bucket_elements: int) -> _Flat:
    """One flat tensor for `parameters`, which get their `main_grad`.

    The order is the reverse of registration, which is roughly that of the backward pass: buckets
    fill up one after the other, so that reducing one could overlap with computing the next.
    """
    ordered = list(reversed(parameters))
    starts = [0]
    for parameter in ordered:
        starts.append(starts[-1] + -(-parameter.numel() // _ALIGN_ELEMENTS) * _ALIGN_ELEMENTS)
    data = torch.zeros(starts[-1], dtype=dtype, device=ordered[0].device)
    buckets, first = [], 0
    for index, parameter in enumerate(ordered):
        view = data[starts[index] : starts[index] + parameter.numel()].view(parameter.shape)
        parameter.main_grad = view  # type: ignore[attr-defined]  # part of our own vocabulary
        is_last = index == len(ordered) - 1
        if is_last or starts[index + 1] - starts[first] >= bucket_elements:
            members = tuple(ordered[first : index + 1])
            buckets.append(Bucket(starts[first], starts[index + 1], members))
            first = index + 1
    return _Flat(data, tuple(buckets))
