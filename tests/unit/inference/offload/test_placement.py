"""Layers lie where there is room, and as many as possible where they are computed."""

import math
import re
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import MachineError
from megatron.inference.offload.placement import (
    CPU,
    DISK,
    LAYERS_IN_ROOM,
    DeviceMap,
    LayerBytes,
    LayerPlacement,
    Memory,
    WorkingBytes,
    least_on_compute,
    place_layers,
)
from tests.support.examples import examples


def holding(cache: int, step: int) -> Callable[[int], WorkingBytes]:
    """Return what is held beside weights, whatever memory there is."""
    return lambda nbytes: WorkingBytes(cache, step)


NOTHING = holding(0, 0)
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=7)
ROOMS = st.lists(st.integers(0, 120), min_size=2, max_size=4)


def layers_of(*sizes: int, in_place: bool = False) -> list[LayerBytes]:
    return [
        LayerBytes(f"layers.{at}", size, 0 if in_place else size) for at, size in enumerate(sizes)
    ]


def memories_of(*rooms: int) -> list[Memory]:
    """Return GPUs, then the CPU and the disk."""
    gpus = [Memory(f"cuda:{at}", room) for at, room in enumerate(rooms[:-2])]
    return [*gpus, Memory(CPU, rooms[-2]), Memory(DISK, rooms[-1])]


def check(placement: LayerPlacement, layers: list[LayerBytes], memories: list[Memory]) -> None:
    assert placement.layers == tuple(layers)
    for memory in memories:
        assert placement.used(memory.name) <= memory.nbytes
    away = [each.nbytes for each, home in zip(layers, placement.homes) if home != placement.compute]
    assert placement.room == LAYERS_IN_ROOM * max(away, default=0)
    assert placement.is_resident == (not away)


@examples(400)
@given(SIZES, ROOMS, st.sampled_from(DeviceMap), st.integers(0, 9), st.booleans())
def test_what_is_placed_fits_everywhere_and_what_is_refused_lacks_room(
    sizes: list[int], rooms: list[int], device_map: DeviceMap, cache: int, in_place: bool
) -> None:
    layers, memories = layers_of(*sizes, in_place=in_place), memories_of(*rooms)
    working = WorkingBytes(cache, 3)
    working_in = holding(cache, 3)
    try:
        placement = place_layers(layers, memories, device_map, working_in)
    except MachineError:
        needed = least_on_compute(layers, working)
        # Packing may waste less than the largest layer in each memory.
        slack = max(sizes) * (len(memories) + LAYERS_IN_ROOM)
        lacks_disk = not in_place and sum(rooms) < sum(sizes) + working.total + slack
        assert memories[0].nbytes < needed or lacks_disk
    else:
        check(placement, layers, memories)


@examples(100)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 60))
def test_what_stays_lacks_less_than_a_layer_of_what_any_choice_would_keep(
    sizes: list[int], room: int
) -> None:
    """All choices of layers that stay are tried: placing in order wastes less than one layer."""
    layers, memories = layers_of(*sizes, in_place=True), memories_of(room, 0)
    best = -1
    for stays in product((False, True), repeat=len(sizes)):
        kept = sum(size for size, stay in zip(sizes, stays) if stay)
        away = max((size for size, stay in zip(sizes, stays) if not stay), default=0)
        if kept + LAYERS_IN_ROOM * away <= room:
            best = max(best, kept)
    if best < 0:
        with pytest.raises(MachineError, match="the model does not fit"):
            place_layers(layers, memories, DeviceMap.AUTO, NOTHING)
        return
    placement = place_layers(layers, memories, DeviceMap.AUTO, NOTHING)
    assert best - max(sizes) < placement.weights_in(CPU) <= best


def test_a_large_layer_stays_so_that_less_room_is_needed_for_those_that_come() -> None:
    placement = place_layers(
        layers_of(30, 4, 4, 4, 4), memories_of(44, 99), DeviceMap.AUTO, NOTHING
    )
    assert placement.homes == (CPU, CPU, DISK, DISK, DISK)
    assert placement.room == 8


def test_small_layers_behind_a_large_one_fill_what_is_left() -> None:
    placement = place_layers(
        layers_of(5, 5, 5, 5, 1), memories_of(16, 99), DeviceMap.SEQUENTIAL, NOTHING
    )
    assert placement.homes == (CPU, DISK, DISK, DISK, CPU)


def test_sequential_fills_the_first_gpu_and_balanced_gives_all_the_same() -> None:
    layers, memories = layers_of(*[5] * 8), memories_of(100, 100, 100, 0)
    for device_map in (DeviceMap.SEQUENTIAL, DeviceMap.AUTO):
        assert place_layers(layers, memories, device_map, NOTHING).is_resident
    balanced = place_layers(layers, memories, DeviceMap.BALANCED, NOTHING)
    assert (balanced.weights_in("cuda:0"), balanced.weights_in("cuda:1")) == (20, 20)


def test_auto_is_balanced_where_one_gpu_is_too_small_and_the_rest_goes_to_cpu_then_disk() -> None:
    layers = layers_of(*[5] * 10)
    balanced = place_layers(layers, memories_of(40, 40, 50, 0), DeviceMap.AUTO, NOTHING)
    assert [balanced.weights_in(f"cuda:{at}") for at in (0, 1)] == [25, 25]
    spilled = place_layers(layers, memories_of(20, 10, 10, 99), DeviceMap.AUTO, NOTHING)
    homes = [spilled.weights_in(name) for name in ("cuda:0", "cuda:1", CPU, DISK)]
    assert homes == [10, 10, 10, 20]


def test_keys_values_and_a_step_are_counted_where_layers_are_computed() -> None:
    layers = layers_of(5, 5)
    assert place_layers(layers, memories_of(10, 0), DeviceMap.AUTO, NOTHING).is_resident
    with pytest.raises(MachineError, match="the model does not fit") as caught:
        place_layers(layers, memories_of(10, 99), DeviceMap.AUTO, holding(2, 1))
    assert "ask for fewer or shorter sequences" in caught.value.fix
    assert "cpu needs 0.01MiB at least" in caught.value.fix


def test_a_refusal_has_the_numbers_and_what_would_help() -> None:
    gib = 2**30
    layers = [LayerBytes("layers.0", 4 * gib, 4 * gib), LayerBytes("layers.1", 4 * gib, 4 * gib)]
    with pytest.raises(MachineError) as caught:
        place_layers(layers, memories_of(6 * gib, 0), DeviceMap.AUTO, NOTHING)
    assert "8.00GiB of weights, the largest layer 4.00GiB" in str(caught.value.found)
    assert "6.00GiB of cpu, 0.00MiB of disk" in str(caught.value.found)
    assert "cpu needs 8.00GiB at least" in caught.value.fix
    layers += [LayerBytes("layers.2", 4 * gib, 4 * gib)]
    with pytest.raises(MachineError) as caught:
        place_layers(layers, memories_of(9 * gib, 0), DeviceMap.AUTO, NOTHING)
    assert "add --offload-folder FOLDER on a disk with room" in caught.value.fix
    with pytest.raises(MachineError) as caught:
        place_layers(layers, memories_of(9 * gib, 5 * gib), DeviceMap.AUTO, NOTHING)
    assert "free 6.00GiB on the disk of --offload-folder" in caught.value.fix


def test_layers_that_are_read_in_place_need_no_room_on_the_disk() -> None:
    layers = layers_of(5, 5, 5, in_place=True)
    placement = place_layers(layers, memories_of(10, 0), DeviceMap.AUTO, NOTHING)
    assert placement.homes == (DISK, DISK, DISK)
    assert placement.to_write == 0


def test_the_report_says_what_lies_where_and_how_long_reading_takes() -> None:
    gib = 2**30
    layers = [
        LayerBytes(name, gib, gib if name == "layers.2" else 0)
        for name in ("embedding", *(f"layers.{at}" for at in range(5)), "final_norm")
    ]
    memories = memories_of(5 * gib + 40, 9 * gib)
    placement = place_layers(layers, memories, DeviceMap.AUTO, holding(30, 10))
    assert placement.lines(2e9) == [
        "7.00GiB of weights in 7 layers, computed on cpu",
        "cpu: embedding, layers.0 to 1 (3.00GiB), keys and values 0.01MiB, a step 0.01MiB, room "
        "for layers that come 2.00GiB; 5.01GiB may be used",
        "disk: layers.2 to 4, final_norm (4.00GiB), of which 1.00GiB in the offload folder, the "
        "rest in place; read in each step: 2.15 s at 2000 MB/s; 9.00GiB may be used",
    ]
    assert "read in each step" not in "".join(placement.lines())


@examples(100)
@given(SIZES, st.integers(0, 60), st.integers(0, 300))
def test_a_refusal_names_memory_that_is_enough(sizes: list[int], one: int, wanted: int) -> None:
    """Keys and values take a quarter of the memory, from those of one sequence to all wanted."""
    mib = 2**20
    layers = layers_of(*(size * mib for size in sizes), in_place=True)

    def working_in(nbytes: int) -> WorkingBytes:
        return WorkingBytes(max(one * mib, min(wanted * mib, nbytes // 4)), mib)

    with pytest.raises(MachineError) as caught:
        place_layers(layers, memories_of(1000, 0), DeviceMap.AUTO, working_in)
    least = re.search(r"cpu needs (\S+)MiB at least", caught.value.fix)
    assert least is not None
    enough = math.ceil(float(least[1]) * mib)
    place_layers(layers, memories_of(enough, 0), DeviceMap.AUTO, working_in)
