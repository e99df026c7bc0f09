"""Fills a model that was built on `meta` from a checkpoint, each layer in its place, one at a time.

What goes where is known, logged and found to fit before a weight is read. At most one layer beside
those in their place is in memory while it loads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron import device, log
from megatron.checkpoint.files.mapped_tensors import (
    MappedFile,
    MappedTensors,
    TensorRange,
    read_rate,
)
from megatron.checkpoint.files.safetensors_io import dtype_code_of
from megatron.errors import MegatronError
from megatron.inference.offload.memory_limits import usable_memories
from megatron.inference.offload.offload_folder import OffloadedTensor, OffloadFolder
from megatron.inference.offload.offloaded_layers import (
    OffloadedLayer,
    OffloadedLayers,
    StoredLayer,
    UploadedLayer,
    placeholder,
)
from megatron.inference.offload.placement import (
    CPU,
    DISK,
    LAYERS_IN_ROOM,
    DeviceMap,
    LayerBytes,
    LayerPlacement,
    place_layers,
)
from megatron.inference.offload.working_bytes import CacheDemand, cache_blocks, working_bytes
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import LayerSpec
from megatron.mpu.context import ParallelContext


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """How a model is shared out over memories, as flags say.

    Attributes:
        demand: what will be generated at a time.
        max_memory: the bytes of each memory, by name; what is free for those that are not named.
        folder: for layers on the disk that the checkpoint does not hold as they are needed.
    """

    device_map: DeviceMap
    demand: CacheDemand
    max_memory: Mapping[str, int] = field(default_factory=dict)
    folder: Path | None = None


class WeightSource(Protocol):
    """A checkpoint that a model is filled from."""

    def range_of(self, name: str) -> TensorRange | None:
        """Return where a parameter lies whole, as it is; None if nowhere."""

    def fill(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Read the whole of some parameters, by their names in the model."""

    def verify(self) -> None:
        """Check all files, as far as their format allows, before any is read in place."""

    def content_digest(self) -> str:
        """Return a digest of the content of the checkpoint."""


class PlacedModel(NamedTuple):
    """Where the layers of a model lie, and the blocks of keys and values that have room beside."""

    placement: LayerPlacement
    blocks: int


class _Layer(NamedTuple):
    name: str
    parameters: dict[str, nn.Parameter]  # by global names
    in_place: dict[str, TensorRange]

    def tensors(self) -> list[OffloadedTensor]:
        """Return what an offload folder has to hold of it."""
        return [
            OffloadedTensor(name, dtype_code_of(parameter.dtype), tuple(parameter.shape))
            for name, parameter in self.parameters.items()
            if name not in self.in_place
        ]


def place_model(
    model: GPTModel, ctx: ParallelContext, source: WeightSource, options: PlacementOptions
) -> "PlacedModel":
    """Give a model on `meta` its weights, and return where its layers lie.

    Raises:
        ConfigError: limits of memories that are not there.
        MachineError: the model does not fit, before anything is read.
        CheckpointError: the checkpoint is damaged, or the offload folder cannot be written.
    """
    names = layer_names(model.specs)
    layers = [_layer(model, name, source) for name in dict.fromkeys(names)]
    folder = _FolderOfSource(options.folder, source)
    memories = usable_memories(options.max_memory, options.folder)
    sizes = [_sizes(layer, folder) for layer in layers]
    working_in = partial(working_bytes, model, ctx, options.demand)
    placement = place_layers(sizes, memories, options.device_map, working_in)
    blocks = cache_blocks(model, ctx, options.demand, memories[0].nbytes)
    on_disk = [layer for layer in layers if placement.home_of[layer.name] == DISK]
    for line in placement.lines(_rate(on_disk)):
        log.info(line)
    if any(layer.in_place for layer in on_disk):
        source.verify()
    rooms = _upload_rooms(layers, placement)
    scratch = _Scratch(on_disk)
    offloaded: dict[str, OffloadedLayer] = {}
    files: dict[Path, MappedFile] = {}
    for layer in layers:
        home = placement.home_of[layer.name]
        if home == placement.compute:
            source.fill(_replace(model, layer, _empty_here))
            continue
        stored: Sequence[Tensor] | MappedTensors
        if home == DISK:
            stored = MappedTensors(_ranges(layer, folder, source, scratch), files)
        else:
            stored = _filled(layer, source, home)
        _replace(model, layer, _nothing_here)
        parameters = [model.get_parameter(name) for name in layer.parameters]
        offloaded[layer.name] = OffloadedLayer(parameters, _stored(stored, rooms))
    folder.note_others(files)
    if offloaded:
        model.weights = OffloadedLayers(names, offloaded)
    return PlacedModel(placement, blocks)


def layer_names(specs: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Return the name of the layer at each place; what is a part of one before has its name."""
    names: list[str] = []
    for spec in specs:
        of = next((name for name in names if f"{spec.name}.".startswith(f"{name}.")), spec.name)
        names.append(of)
    return tuple(names)


def _layer(model: GPTModel, name: str, source: WeightSource) -> _Layer:
    parameters = dict(model.get_submodule(name).named_parameters(prefix=name))
    in_place = {}
    for each, parameter in parameters.items():
        found = source.range_of(each)
        expected = (dtype_code_of(parameter.dtype), tuple(parameter.shape))
        if found is not None and found[3:] == expected:
            in_place[each] = found
    return _Layer(name, parameters, in_place)


def _sizes(layer: _Layer, folder: "_FolderOfSource") -> LayerBytes:
    total = sum(parameter.nbytes for parameter in layer.parameters.values())
    to_write = sum(
        parameter.nbytes
        for name, parameter in layer.parameters.items()
        if name not in layer.in_place
    )
    if to_write and folder.is_recorded(layer):
        to_write = 0
    return LayerBytes(layer.name, total, to_write)


def _rate(layers: Sequence[_Layer]) -> float | None:
    """Return the measured rate of the disk that layers are read from in place, if there are any."""
    ranges: Iterator[TensorRange] = (each for x in layers for each in x.in_place.values())
    first = next(ranges, None)
    return None if first is None else read_rate(first.path)


def _upload_rooms(layers: Sequence[_Layer], placement: LayerPlacement) -> device.UploadRooms | None:
    """Return rooms on a GPU for the largest layer that comes; None on a CPU, or if none comes."""
    away = [layer for layer in layers if placement.home_of[layer.name] != placement.compute]
    if placement.compute == CPU or not away:
        return None
    largest = max(device.room_bytes(list(layer.parameters.values())) for layer in away)
    return device.UploadRooms(largest, LAYERS_IN_ROOM)


def _stored(
    stored: Sequence[Tensor] | MappedTensors, rooms: device.UploadRooms | None
) -> StoredLayer:
    if rooms is not None:
        return UploadedLayer(stored, rooms)
    assert isinstance(stored, MappedTensors)  # noqa: S101  # invariant: a CPU has no other place
    return stored


def _replace(
    model: GPTModel, layer: _Layer, make: Callable[[Tensor], Tensor]
) -> dict[str, nn.Parameter]:
    """Put parameters with other values in the place of a layer's, and return them."""
    made = {name: _like(old, make(old)) for name, old in layer.parameters.items()}
    for name, parameter in made.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_parameter(leaf, parameter)
    return made


def _empty_here(like: Tensor) -> Tensor:
    return _empty(like, device.current())


def _empty(like: Tensor, where: torch.device | str) -> Tensor:
    # Of a tensor on `meta`, `empty_like` imports code of 35 MB.
    return torch.empty(like.shape, dtype=like.dtype, device=where)


def _nothing_here(like: Tensor) -> Tensor:
    return placeholder(like, device.current())


def _like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Return a parameter with other values, split over ranks and initialised as `parameter` is."""
    made = nn.Parameter(values, requires_grad=False)
    made.__dict__.update(parameter.__dict__)
    return made


def _filled(layer: _Layer, source: WeightSource, home: str) -> list[Tensor]:
    """Return the weights of a layer in the memory of the host, pinned, or of another GPU."""
    made: dict[str, nn.Parameter] = {}
    for name, old in layer.parameters.items():
        if home == CPU:
            values = device.host_empty(old.numel(), old.dtype).view(old.shape)
        else:
            values = _empty(old, home)
        made[name] = _like(old, values)
    source.fill(made)
    return [parameter.data for parameter in made.values()]


def _ranges(
    layer: _Layer, folder: "_FolderOfSource", source: WeightSource, scratch: "_Scratch"
) -> list[TensorRange]:
    """Return where the weights of a layer lie on the disk; writes what does not."""
    ranges = dict(layer.in_place)
    wanted = layer.tensors()
    if wanted:
        found = folder.open().find(layer.name, wanted)
        if found is None:
            values = scratch.like([layer.parameters[each.name] for each in wanted])
            source.fill(
                {
                    each.name: _like(layer.parameters[each.name], place)
                    for each, place in zip(wanted, values)
                }
            )
            found = folder.open().write(layer.name, wanted, values)
        ranges |= {each.name: at for each, at in zip(wanted, found)}
    return [ranges[name] for name in layer.parameters]


class _Scratch:
    """Memory for one layer on its way to the disk, used again for the next.

    Allocated anew for each, they would not all fit into what was freed before.
    """

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self._nbytes = max(
            (
                device.room_bytes([layer.parameters[each.name] for each in layer.tensors()])
                for layer in layers
            ),
            default=0,
        )
        self._bytes: Tensor | None = None

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return memory of the shapes and dtypes of tensors."""
        if self._bytes is None:
            self._bytes = torch.empty(self._nbytes, dtype=torch.uint8, device=CPU)
        return device.places_in(self._bytes, tensors)


class _FolderOfSource:
    """An offload folder, whose checkpoint is digested when that is first needed."""

    def __init__(self, folder: Path | None, source: WeightSource) -> None:
        self._folder, self._source = folder, source
        self._opened: OffloadFolder | None = None

    def open(self) -> OffloadFolder:
        """Return the folder."""
        if self._folder is None:
            raise MegatronError(
                "internal error: a layer has no place on the disk",
                found="no offload folder",
                fix="report it, with the flags of the run",
            )
        if self._opened is None:
            self._opened = OffloadFolder(self._folder, self._source.content_digest())
        return self._opened

    def is_recorded(self, layer: _Layer) -> bool:
        """Return whether the folder seems to have a layer."""
        if self._folder is None or not any(self._folder.glob(f"{layer.name}-*")):
            return False
        return self.open().is_recorded(layer.name, layer.tensors())

    def note_others(self, own: Mapping[Path, object]) -> None:
        """Log what else lies there."""
        if self._opened is not None:
            self._opened.note_others(list(own))
