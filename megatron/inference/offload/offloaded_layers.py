"""Brings the weights of a layer before it is computed, and drops them after it.

While a layer is computed, a thread brings the next one that is not in memory, around the end of the
model to its begin, so that at most `LAYERS_IN_ROOM` of them are there. Weights that are dropped are
NaN, so that a layer that is run past this shows in every score.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.checkpoint.files.mapped_tensors import MappedTensors
from megatron.device import RoomUpload, UploadRooms
from megatron.model.specs import Carry


class StoredLayer(Protocol):
    """The weights of a layer where they lie."""

    def bring(self) -> None:
        """Read them to where they are computed with; a thread calls it, for one layer at a time.

        Raises:
            CheckpointError: they cannot be read, or have changed.
        """

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The weights where they are computed with, after `bring`."""

    def drop(self) -> None:
        """Give their memory back."""


class UploadedLayer:
    """A layer that a GPU computes, in memory of the host, of another GPU, or in files.

    Args:
        source: pinned tensors of the host, tensors of another GPU, or those of files.
        rooms: the rooms of the GPU, shared by all layers.
    """

    def __init__(self, source: Sequence[Tensor] | MappedTensors, rooms: UploadRooms) -> None:
        self._source, self._rooms = source, rooms
        self._upload: RoomUpload | None = None

    def bring(self) -> None:
        """Begin to copy the weights; kernels wait for them, the host does not."""
        if isinstance(self._source, MappedTensors):
            self._source.bring()
            self._upload = self._rooms.send(self._source.tensors)
            self._source.drop()
        else:
            self._upload = self._rooms.send(self._source)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The weights on the GPU, for kernels launched from here on."""
        assert self._upload is not None  # noqa: S101  # invariant: after bring
        return self._rooms.take(self._upload)

    def drop(self) -> None:
        """Give the room on the GPU back."""
        assert self._upload is not None  # noqa: S101  # invariant: after bring
        self._rooms.release(self._upload)
        self._upload = None


class OffloadedLayer:
    """A layer whose parameters hold what they hold now while it is not in memory: placeholders."""

    def __init__(self, parameters: Sequence[nn.Parameter], stored: StoredLayer) -> None:
        self.stored = stored
        self._placeholders = [(parameter, parameter.data) for parameter in parameters]

    def fill(self) -> None:
        """Give the parameters their weights, which have been brought."""
        for (parameter, _), weights in zip(self._placeholders, self.stored.tensors, strict=True):
            parameter.data = weights

    def drop(self) -> None:
        """Take the weights away."""
        for parameter, nothing in self._placeholders:
            parameter.data = nothing
        self.stored.drop()


def placeholder(like: Tensor, where: torch.device) -> Tensor:
    """Return NaN in the shape and dtype of a tensor, on a device, in the memory of one element."""
    nan = torch.full((1,), float("nan"), dtype=like.dtype, device=where)
    return nan.as_strided(like.shape, (0,) * like.dim())


class OffloadedLayers:
    """The `LayerWeights` of a model some of whose layers are not in memory; used by one thread.

    Args:
        names: of the layer at each place of the model; tied weights are one layer.
        layers: those that are not in memory, by name.
    """

    def __init__(self, names: Sequence[str], layers: Mapping[str, OffloadedLayer]) -> None:
        self._names, self._layers = tuple(names), dict(layers)
        self._held: str | None = None
        self._coming: tuple[str, Future[None]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offloaded-layers")

    def run(
        self,
        at: int,
        module: nn.Module,
        layer: Callable[[Carry], Carry],
        carry: Carry,
        *,
        is_last: bool,
    ) -> Carry:
        """Run the layer at a place of the model with its weights in memory.

        Raises:
            CheckpointError: the weights of this layer, or of the next one, cannot be read.
        """
        name = self._names[at]
        if name in self._layers:
            self._enter(name)
        self._send_for_next(at)
        try:
            return layer(carry)
        finally:
            following = self._names[(at + 1) % len(self._names)]
            if self._held == name != following:
                self._leave()

    def _enter(self, name: str) -> None:
        if self._held == name:
            self._layers[name].fill()  # again: files are looked at before each use
            return
        if self._held is not None:  # a pass began elsewhere than the one before ended
            self._leave()
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] != name:
            coming[1].result()
            self._layers[coming[0]].stored.drop()
            coming = None
        if coming is None:
            coming = (name, self._thread.submit(self._layers[name].stored.bring))
        coming[1].result()
        self._layers[name].fill()
        self._held = name

    def _send_for_next(self, at: int) -> None:
        if self._coming is not None:
            return
        around = self._names[at + 1 :] + self._names[:at]
        wanted = next((n for n in around if n in self._layers and n != self._held), None)
        if wanted is not None:
            self._coming = (wanted, self._thread.submit(self._layers[wanted].stored.bring))

    def _leave(self) -> None:
        held, self._held = self._held, None
        assert held is not None  # noqa: S101  # invariant: of its callers
        self._layers[held].drop()
