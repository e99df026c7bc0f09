"""A layer has its weights while it runs, and few others have theirs."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron.checkpoint.files.mapped_tensors import MappedTensors
from megatron.errors import CheckpointError
from megatron.inference.offload.offloaded_layers import (
    OffloadedLayer,
    OffloadedLayers,
    UploadedLayer,
    placeholder,
)
from megatron.inference.offload.placement import LAYERS_IN_ROOM
from tests.support.examples import examples

CPU = torch.device("cpu")


class Room:
    """What is in memory, and the most that ever was."""

    def __init__(self) -> None:
        self.inside: set[str] = set()
        self.most = 0
        self.brought: list[tuple[str, int]] = []


class FakeLayer:
    """A layer whose weight is its number."""

    def __init__(self, name: str, number: int, room: Room) -> None:
        self.name, self.room, self.values = name, room, [torch.tensor([float(number)])]
        self.broken = False

    def bring(self) -> None:
        if self.broken:
            raise CheckpointError("the disk is gone", found=self.name, fix="use another")
        assert self.name not in self.room.inside
        self.room.inside.add(self.name)
        self.room.most = max(self.room.most, len(self.room.inside))
        self.room.brought.append((self.name, threading.get_ident()))

    @property
    def tensors(self) -> Sequence[Tensor]:
        assert self.name in self.room.inside
        return self.values

    def drop(self) -> None:
        self.room.inside.remove(self.name)


class Model:
    """Places whose layers have one parameter each; layers of equal name share it."""

    def __init__(self, names: Sequence[str], offloaded: set[str]) -> None:
        self.names, self.room = list(names), Room()
        self.modules = {name: nn.Linear(1, 1, bias=False) for name in names}
        self.stored = {n: FakeLayer(n, at, self.room) for at, n in enumerate(self.modules)}
        layers = {}
        for name, module in self.modules.items():
            module.requires_grad_(False)
            if name in offloaded:
                module.weight.data = placeholder(module.weight, CPU)
                layers[name] = OffloadedLayer([module.weight], self.stored[name])
            else:
                module.weight.data = self.stored[name].values[0]
        self.weights = OffloadedLayers(names, layers)

    def run(self, start: int, stop: int) -> list[float]:
        """Return the weights that layers [start, stop) have when they run."""
        seen: list[float] = []
        for at in range(start, stop):
            module = self.modules[self.names[at]]

            def layer(carry: Any, module: nn.Linear = module) -> Any:
                seen.append(float(module.weight.flatten()[0]))
                return carry

            is_last = at == len(self.names) - 1
            self.weights.run(at, module, layer, (), is_last=is_last)
        return seen

    def expected(self, start: int, stop: int) -> list[float]:
        return [float(self.stored[self.names[at]].values[0]) for at in range(start, stop)]


NAMES = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=7)


@examples(200)
@given(NAMES, st.sets(st.sampled_from("abcdef")), st.lists(st.tuples(*[st.integers(0, 7)] * 2)))
def test_each_layer_has_its_weights_whatever_parts_are_run(
    names: list[str], offloaded: set[str], parts: list[tuple[int, int]]
) -> None:
    model = Model(names, offloaded)
    for start, stop in [*parts, (0, len(names)), (0, len(names))]:
        stop = min(stop, len(names))
        assert model.run(start, stop) == model.expected(start, stop)
    assert model.room.most <= LAYERS_IN_ROOM


def test_the_next_layer_comes_beside_the_one_that_is_computed_in_one_other_thread() -> None:
    model = Model("abcd", {"a", "c", "d"})
    model.run(0, 1)
    model.weights._coming[1].result()
    assert [name for name, _ in model.room.brought] == ["a", "c"]
    model.run(1, 3)
    model.weights._coming[1].result()
    assert [name for name, _ in model.room.brought] == ["a", "c", "d"]
    model.run(3, 4)
    model.weights._coming[1].result()
    assert [name for name, _ in model.room.brought] == ["a", "c", "d", "a"], "for the next pass"
    threads = {thread for _, thread in model.room.brought}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_tied_weights_stay_from_the_end_of_a_pass_to_the_begin_of_the_next() -> None:
    model = Model("abca", {"a", "b", "c"})
    for _ in range(3):
        model.run(0, 4)
    assert [name for name, _ in model.room.brought].count("a") == 4
    assert model.room.most <= LAYERS_IN_ROOM


def test_weights_that_are_not_there_are_nan() -> None:
    model = Model("ab", {"a"})
    model.run(0, 2)
    weight = model.modules["a"].weight
    assert weight.isnan().all()
    wide = placeholder(torch.empty(1000, 1000, dtype=torch.bfloat16), CPU)
    assert (wide.shape, wide.dtype) == ((1000, 1000), torch.bfloat16)
    assert wide.isnan().all()
    assert wide.untyped_storage().nbytes() == 2


def test_an_error_of_the_thread_is_that_of_the_pass_and_the_next_pass_tries_again() -> None:
    model = Model("abc", {"b", "c"})
    model.stored["c"].broken = True
    with pytest.raises(CheckpointError, match="the disk is gone"):
        model.run(0, 3)
    model.stored["c"].broken = False
    assert model.run(0, 3) == model.expected(0, 3)
    assert model.room.most <= LAYERS_IN_ROOM


def test_a_layer_that_fails_gives_its_memory_back() -> None:
    model = Model("ab", {"a"})

    def fail(carry: Any) -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        model.weights.run(0, model.modules["a"], fail, (), is_last=False)
    assert model.modules["a"].weight.isnan().all()


class FakeRooms:
    """Rooms of a GPU, as a list of what is done with them."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.done.append("send")
        return [tensor.clone() for tensor in tensors]

    def take(self, upload: list[Tensor]) -> list[Tensor]:
        self.done.append("take")
        return upload

    def release(self, upload: list[Tensor]) -> None:
        self.done.append("release")


class FakeFiles(MappedTensors):
    """Tensors of files, as a list of what is done with them."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    @property
    def tensors(self) -> list[Tensor]:
        return [torch.ones(3)]

    def bring(self) -> None:
        self.done.append("read")

    def drop(self) -> None:
        self.done.append("drop")


def test_a_gpu_gets_layers_of_the_host_and_of_files_in_its_rooms() -> None:
    rooms: Any = FakeRooms()
    for source, steps in (
        ([torch.ones(3)], ["send", "take", "release"]),
        (FakeFiles(rooms.done), ["read", "send", "drop", "take", "release"]),
    ):
        rooms.done.clear()
        layer = UploadedLayer(source, rooms)
        layer.bring()
        (values,) = layer.tensors
        assert torch.equal(values, torch.ones(3))
        layer.drop()
        assert rooms.done == steps
