"""Activation recomputation that draws the same random numbers the second time.

Not torch's checkpoint: it reads states of generators, which fails while a CUDA graph is captured,
and imports the compiler (26 MB, and 2 s of the first step). A region with collectives recomputes
them too, so every rank of a tp group must recompute alike.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import pad

from megatron import device
from megatron.errors import NumericsError
from megatron.mpu.collectives import all_gather
from megatron.mpu.context import Group
from megatron.mpu.offload import Offload, Packed
from megatron.mpu.random import RandomStreams

Result = TypeVar("Result")


def recompute(function: Callable[..., Result], streams: RandomStreams, *inputs: object) -> Result:
    """Run `function(*inputs)` without saving its intermediates; backward computes them again.

    Inputs and outputs may be tensors or anything else, several of each. The second run, in
    backward, draws what the first did (`RandomStreams.repeat`): results are bit-equal to those
    without recomputation. It ends as soon as all that backward needs is there.

    Raises:
        NumericsError: in backward, the second run saves other tensors than the first.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    region = _Region(function, streams, inputs)
    with saved_tensors_hooks(region.pack, region.unpack):
        return function(*inputs)


@contextmanager
def split_over(tp: Group, *, offload: Offload | None = None) -> Iterator[None]:
    """Save only this rank's part of the elements of every floating tensor, inside the block.

    For the inputs of `recompute`, which must be equal on all ranks of `tp`; backward gathers them,
    so every rank has to run it alike. With `offload` the part goes to host memory.
    """

    def pack(tensor: Tensor) -> object:
        if not tensor.is_floating_point():
            return tensor if offload is None else offload.pack(tensor)
        part = _own_part(tensor.detach(), tp)
        return _Part(part if offload is None else offload.pack(part), tensor.shape)

    def unpack(saved: "Packed | _Part") -> Tensor:
        if not isinstance(saved, _Part):
            return Offload.unpack(saved)
        return all_gather(Offload.unpack(saved.part), tp)[: saved.shape.numel()].view(saved.shape)

    with saved_tensors_hooks(pack, unpack):
        yield


@contextmanager
def forgetting(output: Tensor, again: Callable[[], Tensor]) -> Iterator[None]:
    """Save nothing of `output` inside the block; backward calls `again` to recompute it.

    For an output that is cheap to compute from something that is kept anyway (a norm's). `again`
    must give the same bits and strides, and draw no random numbers.
    """
    storage = output.untyped_storage()._cdata  # of data all tensors on `meta` have one address

    def pack(tensor: Tensor) -> object:
        if tensor.untyped_storage()._cdata != storage:
            return tensor
        return _Forgotten(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(saved: "Tensor | _Forgotten") -> Tensor:
        if not isinstance(saved, _Forgotten):
            return saved
        with torch.no_grad():
            return again().as_strided(saved.size, saved.stride, saved.offset)

    with saved_tensors_hooks(pack, unpack):
        yield


class _Part(NamedTuple):
    """This rank's part of a saved tensor, or its place on the host, and the whole shape."""

    part: Packed
    shape: torch.Size


class _Forgotten(NamedTuple):
    """The view of a recomputed output that a saved tensor was."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _own_part(tensor: Tensor, tp: Group) -> Tensor:
    """Return [ceil(n / tp)] of the n elements, in its own memory; the last part is padded."""
    flat = tensor.reshape(-1)
    each = -(-flat.numel() // tp.size)
    own = flat[tp.rank * each : (tp.rank + 1) * each]
    return pad(own, (0, each - own.numel())) if own.numel() < each else own.clone()


class _Region:
    """One call of a recomputed function: places for what its graph saves, and how to fill them."""

    def __init__(
        self, function: Callable[..., object], streams: RandomStreams, inputs: Sequence[object]
    ) -> None:
        self._function = function
        self._as_before = streams.repeat()
        self._inputs = [_SAVED if isinstance(one, Tensor) else one for one in inputs]
        # Autograd saves tensors, so that hooks around the region get them (`split_over`).
        self._saved: Any = _SaveInputs.apply(  # type: ignore[no-untyped-call]  # torch's
            torch.empty(0, requires_grad=True, device=device.current()),
            *(one for one in inputs if isinstance(one, Tensor)),
        )
        # Weak: a place whose part of the graph is gone needs no tensor.
        self._places: list[tuple[weakref.ref[_Place], _Kind]] = []

    def pack(self, tensor: Tensor) -> "_Place":
        """Return a place for `tensor`, which is not kept."""
        place = _Place()
        self._places.append((weakref.ref(place), _kind(tensor)))
        return place

    def unpack(self, place: "_Place") -> Tensor:
        """Return the tensor of a place and forget it: a further backward pass recomputes."""
        if place.tensor is None:
            self._fill()
        tensor, place.tensor = place.tensor, None
        if tensor is None:
            raise _other_tensors("fewer tensors than the first time")
        return tensor

    def _fill(self) -> None:
        """Call the function again, until it has saved its last tensor."""
        saved = iter(self._saved.grad_fn.saved_tensors)
        inputs = [next(saved) if one is _SAVED else one for one in self._inputs]
        expected = iter(self._places)
        left = len(self._places)

        def fill(tensor: Tensor) -> Tensor:
            nonlocal left
            place, kind = next(expected)
            if _kind(tensor) != kind:
                raise _other_tensors(f"{_kind(tensor)} where {kind} was saved the first time")
            alone = tensor.detach()  # with its history the new graph would hold itself
            if (kept := place()) is not None:
                kept.tensor = alone
            left -= 1
            if left == 0:
                raise _AllSavedError
            return alone

        again = saved_tensors_hooks(fill, lambda tensor: tensor)
        with suppress(_AllSavedError), self._as_before(), torch.enable_grad(), again:
            self._function(*inputs)


_SAVED = object()  # in place of an input that autograd saves


class _Place:
    """Where autograd finds a tensor in backward; None before it is recomputed."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


class _SaveInputs(torch.autograd.Function):
    """Saves tensors as every operator does; no gradient flows through it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        """Return something that needs a gradient, as `anchor` does, and so has a `grad_fn`."""
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)


class _AllSavedError(Exception):
    """Ends the second call of a recomputed function."""


_Kind = tuple[torch.Size, torch.dtype, torch.device]


def _kind(tensor: Tensor) -> _Kind:
    return tensor.shape, tensor.dtype, tensor.device


def _other_tensors(found: str) -> NumericsError:
    return NumericsError(
        "a recomputed part of the model saves other tensors the second time",
        found=found,
        fix="let it depend on its inputs and on `RandomStreams` alone, or do not recompute it",
    )
