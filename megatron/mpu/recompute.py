"""Activation recomputation that draws the same random numbers the second time.

torch's checkpoint replays the default generators; the samples that numbers are drawn for are set
again here. A region with collectives recomputes them too, so every rank of a tp group must
recompute alike.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from megatron.mpu.collectives import all_gather
from megatron.mpu.context import Group
from megatron.mpu.offload import Offload, Packed
from megatron.mpu.random import RandomStreams

Result = TypeVar("Result")


def recompute(function: Callable[..., Result], streams: RandomStreams, *inputs: object) -> Result:
    """Run `function(*inputs)` without saving its intermediates; backward computes them again.

    Inputs and outputs may be tensors or anything else, several of each. The second run, in
    backward, sees the default generators and the samples of `streams` as the first did, and leaves
    them as it found them: results are bit-equal to those without recomputation.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    replay = _SameSamples(streams)
    result: Result = checkpoint(
        function,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=lambda: (nullcontext(), replay),
    )
    return result


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


class _SameSamples:
    """Sets the samples of streams to their present ones for a block, any number of times.

    Not a generator-based context manager: those can be entered once, and a graph that is kept
    (`retain_graph`) recomputes at every backward.
    """

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams
        self._first = self._outside = streams.samples

    def __enter__(self) -> None:
        self._outside, self._streams.samples = self._streams.samples, self._first

    def __exit__(self, *_: object) -> None:
        self._streams.samples = self._outside
