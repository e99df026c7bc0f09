"""Which memory holds each layer of a model that may be larger than one: arithmetic, without torch.

All layers are computed on one device. Those that lie elsewhere are brought there one after the
other, the next one while the one before is computed, so that device keeps room for two of them. A
layer is never split, and tied weights are one layer.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from megatron.errors import MachineError

DISK = "disk"
CPU = "cpu"
LAYERS_IN_ROOM = 2  # the one that is computed, and the one that comes


class DeviceMap(StrEnum):
    """How layers are shared out over memories.

    `sequential` fills them in order: the device that computes, other GPUs, CPU, disk. `balanced`
    gives GPUs about equally much. `auto` is `sequential` if all fits on the device that computes,
    and otherwise `balanced`.
    """

    AUTO = "auto"
    BALANCED = "balanced"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """One layer with its weights.

    Attributes:
        nbytes: of its weights, in the precision that is computed in.
        to_write: bytes that an offload folder needs for it; 0 if all of them can be read in place.
    """

    name: str
    nbytes: int
    to_write: int


class Memory(NamedTuple):
    """A memory that may hold layers, such as cuda:0, cpu or disk, and the bytes to be used."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class WorkingBytes:
    """What the device that computes holds beside weights: keys and values, and the largest step."""

    cache: int
    step: int

    @property
    def total(self) -> int:
        """Bytes of both."""
        return self.cache + self.step


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """The memory of each layer, in the order of the model.

    Attributes:
        memories: the device that computes first, the disk last.
        room: bytes on the device that computes for layers that come and go.
    """

    layers: tuple[LayerBytes, ...]
    homes: tuple[str, ...]
    memories: tuple[Memory, ...]
    working: WorkingBytes
    room: int

    @property
    def compute(self) -> str:
        """The name of the device that computes."""
        return self.memories[0].name

    @property
    def home_of(self) -> Mapping[str, str]:
        """The memory of each layer, by its name."""
        return {layer.name: home for layer, home in zip(self.layers, self.homes)}

    @property
    def is_resident(self) -> bool:
        """Whether all layers stay on the device that computes."""
        return all(home == self.compute for home in self.homes)

    def weights_in(self, memory: str) -> int:
        """Return the bytes of the layers in a memory."""
        return sum(each.nbytes for each, home in zip(self.layers, self.homes) if home == memory)

    @property
    def to_write(self) -> int:
        """Bytes that the offload folder needs."""
        on_disk = (each for each, home in zip(self.layers, self.homes) if home == DISK)
        return sum(layer.to_write for layer in on_disk)

    def used(self, memory: str) -> int:
        """Return all bytes that are used of a memory; of the disk those that are written."""
        if memory == DISK:
            return self.to_write
        beside = self.working.total + self.room if memory == self.compute else 0
        return self.weights_in(memory) + beside

    def lines(self, read_rate: float | None = None) -> list[str]:
        """Return what lies where as lines for the log.

        Args:
            read_rate: measured bytes per second of the disk.
        """
        total = size_text(sum(layer.nbytes for layer in self.layers))
        lines = [f"{total} of weights in {len(self.layers)} layers, computed on {self.compute}"]
        for memory in self.memories:
            names = [each.name for each, home in zip(self.layers, self.homes) if home == memory[0]]
            if names or memory.name == self.compute:
                lines.append(self._line(memory, names, read_rate))
        return lines

    def _line(self, memory: Memory, names: Sequence[str], read_rate: float | None) -> str:
        weights = self.weights_in(memory.name)
        text = f"{memory.name}: {', '.join(_ranges(names)) or 'no layer'} ({size_text(weights)})"
        if memory.name == self.compute:
            text += (
                f", keys and values {size_text(self.working.cache)}, a step "
                f"{size_text(self.working.step)}, room for layers that come {size_text(self.room)}"
            )
        if memory.name == DISK:
            text += (
                f", of which {size_text(self.to_write)} in the offload folder, the rest in place"
            )
            if read_rate:
                text += f"; read in each step: {weights / read_rate:.2f} s at "
                text += f"{read_rate / 1e6:.0f} MB/s"
        return f"{text}; {size_text(memory.nbytes)} may be used"


def place_layers(
    layers: Sequence[LayerBytes],
    memories: Sequence[Memory],
    device_map: DeviceMap,
    working_in: Callable[[int], WorkingBytes],
) -> LayerPlacement:
    """Return the placement that keeps the most bytes where they are computed.

    Args:
        layers: in the order of the model.
        memories: the device that computes first, then others from fast to slow, the disk last.
        working_in: what is held beside weights on a device with so many bytes.

    Raises:
        MachineError: the layers do not fit, with the bytes that are missing.
    """
    layers, memories = tuple(layers), tuple(memories)
    working = working_in(memories[0].nbytes)
    gpus = [memory.name for memory in memories if memory.name not in (CPU, DISK)]
    found: list[LayerPlacement] = []
    for largest in sorted({0, *(layer.nbytes for layer in layers)}):
        shares: dict[str, int] = {}
        if len(gpus) > 1 and device_map is not DeviceMap.SEQUENTIAL:
            even = -(-sum(layer.nbytes for layer in layers) // len(gpus))
            shares = dict.fromkeys(gpus, even)
        placement = _with_room(layers, memories, working, largest, shares)
        if placement is not None:
            found.append(placement)
    if not found:
        raise _no_room(layers, memories, working_in)
    resident = [placement for placement in found if placement.is_resident]
    if resident and device_map is DeviceMap.AUTO:
        return resident[0]
    if len(gpus) > 1 and device_map is not DeviceMap.SEQUENTIAL:
        return max(found, key=lambda each: (*_evenness(each, gpus), -each.room))
    return max(found, key=lambda each: (each.weights_in(each.compute), -each.room))


def _evenness(placement: LayerPlacement, gpus: Sequence[str]) -> tuple[int, int]:
    """Return what is better the larger it is: bytes on GPUs, and less on the fullest of them."""
    held = [placement.weights_in(name) for name in gpus]
    return sum(held), -max(held)


def least_on_compute(layers: Sequence[LayerBytes], working: WorkingBytes) -> int:
    """Return the least bytes that the device that computes needs, whatever lies elsewhere."""
    sizes = [layer.nbytes for layer in layers]
    return working.total + min(
        sum(size for size in sizes if size > largest) + _room(largest) for largest in {0, *sizes}
    )


def size_text(nbytes: int) -> str:
    """Return bytes as text in GiB or MiB, rounded up, so that a limit of as much is enough."""
    unit, name = (2**30, "GiB") if nbytes >= 2**30 else (2**20, "MiB")
    return f"{math.ceil(nbytes * 100 / unit) / 100:.2f}{name}"


def _room(largest: int) -> int:
    return LAYERS_IN_ROOM * largest


def _with_room(
    layers: tuple[LayerBytes, ...],
    memories: tuple[Memory, ...],
    working: WorkingBytes,
    largest: int,
    shares: Mapping[str, int],
) -> LayerPlacement | None:
    """Return a placement in which no larger layer than `largest` comes and goes, or None.

    Args:
        shares: bytes that GPUs take at first; what is left then goes where there is room.
    """
    left = {memory.name: memory.nbytes for memory in memories}
    compute = memories[0].name
    left[compute] -= working.total + _room(largest)
    homes: dict[str, str] = {}

    def put(layer: LayerBytes, memory: str, most: int) -> bool:
        needed = layer.to_write if memory == DISK else layer.nbytes
        if needed > min(left[memory], most):
            return False
        left[memory] -= needed
        homes[layer.name] = memory
        return True

    for layer in layers:
        if layer.nbytes > largest and not put(layer, compute, left[compute]):
            return None
    if left[compute] < 0:
        return None
    for layer in layers:
        for name, share in shares.items():
            held = sum(each.nbytes for each in layers if homes.get(each.name) == name)
            if layer.name not in homes and put(layer, name, share - held):
                break
    for layer in layers:
        for memory in memories:
            if layer.name in homes or put(layer, memory.name, left[memory.name]):
                break
        else:
            return None
    in_order = tuple(homes[layer.name] for layer in layers)
    away = [each.nbytes for each, home in zip(layers, in_order) if home != compute]
    return LayerPlacement(layers, in_order, memories, working, _room(max(away, default=0)))


def _no_room(
    layers: Sequence[LayerBytes],
    memories: Sequence[Memory],
    working_in: Callable[[int], WorkingBytes],
) -> MachineError:
    total, largest = (size_text(of(x.nbytes for x in layers)) for of in (sum, max))
    compute, disk = memories[0], memories[-1]
    working = working_in(compute.nbytes)
    needed = least_on_compute(layers, working)
    # With more memory there may be more keys and values: a fix has to be enough for those too.
    while (more := least_on_compute(layers, working_in(needed))) > needed:
        needed = more
    has = ", ".join(f"{size_text(memory.nbytes)} of {memory.name}" for memory in memories)
    found = (
        f"{total} of weights, the largest layer {largest}, keys and values "
        f"{size_text(working.cache)}, a step {size_text(working.step)}; to be used: {has}"
    )
    if compute.nbytes < needed:
        fix = (
            f"{compute.name} needs {size_text(needed)} at least: free memory, raise --max-memory, "
            "or ask for fewer or shorter sequences at a time"
        )
    elif disk.nbytes == 0:
        fix = "add --offload-folder FOLDER on a disk with room, or raise --max-memory"
    else:
        lacks = sum(layer.to_write for layer in layers) - sum(m.nbytes for m in memories)
        lacks += working.total + _room(max(layer.nbytes for layer in layers))
        fix = (
            f"free {size_text(max(1, lacks))} on the disk of --offload-folder, or use another disk"
        )
    return MachineError(
        "the model does not fit into the memory that may be used", found=found, fix=fix
    )


def _ranges(names: Sequence[str]) -> Iterator[str]:
    """Yield names, those of layers that follow each other as `layers.3 to 17`."""
    run: list[tuple[str, int]] = []
    for name in (*names, ""):
        matched = re.fullmatch(r"(.*\.)(\d+)", name)
        this = (matched[1], int(matched[2])) if matched else None
        if run and (this is None or this != (run[-1][0], run[-1][1] + 1)):
            first, last = run[0], run[-1]
            yield f"{first[0]}{first[1]}" + (f" to {last[1]}" if last != first else "")
            run = []
        if this is not None:
            run.append(this)
        elif name:
            yield name
