"""What is saved for backward leaves the device and comes back bit for bit, stride for stride."""

import gc
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu import offload as module
from megatron.mpu.offload import Offload
from tests.support.live_bytes import LiveBytes


class Elsewhere:
    """Stands for memory of another device: nothing of the tensor stays."""

    made: ClassVar[list[int]] = []

    def __init__(self, tensor: Tensor) -> None:
        self._bytes = tensor.numpy().tobytes()
        self.made.append(len(self._bytes))

    def back(self) -> Tensor:
        return torch.frombuffer(bytearray(self._bytes), dtype=torch.uint8)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all copies that a test makes."""
    Elsewhere.made = []
    monkeypatch.setattr(module, "HostCopy", Elsewhere)
    return Elsewhere.made


def layer(x: Tensor, weight: Tensor) -> Tensor:
    """Saves views of one storage with other strides, an expanded tensor, integers and booleans."""
    wide = F.linear(x.exp(), weight).sin()
    q, k, v = wide.view(5, 2, 3, 8).permute(2, 1, 0, 3).unbind(0)
    scores = (q @ k.transpose(1, 2)).softmax(-1)
    shifted = (scores @ v).expand(2, 5, 8) * torch.arange(8.0)
    return F.dropout(shifted, 0.5).masked_fill(torch.arange(8) > 5, 0.0).square()


def train(offloading: bool, backwards: int = 1) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 4, requires_grad=True)
    weight = torch.randn(24, 4, requires_grad=True)
    if offloading:
        with Offload([weight]):
            y = layer(x, weight)
    else:
        y = layer(x, weight)
    for _ in range(backwards):
        y.sum().backward(retain_graph=True)
    assert x.grad is not None
    assert weight.grad is not None
    return [y, x.grad, weight.grad]


@pytest.mark.parametrize("backwards", [1, 3])
def test_results_and_gradients_are_bit_equal(backwards: int) -> None:
    for one, other in zip(train(False, backwards), train(True, backwards), strict=True):
        assert torch.equal(one, other)


def test_they_are_bit_equal_when_the_originals_are_gone(elsewhere: list[int]) -> None:
    for one, other in zip(train(False), train(True), strict=True):
        assert torch.equal(one, other)
    assert elsewhere


def test_views_of_one_storage_are_copied_once_and_weights_never(elsewhere: list[int]) -> None:
    weight = torch.randn(6, 4, requires_grad=True)
    x = torch.randn(5, 4, requires_grad=True)
    with Offload([weight]):
        a, b, c = F.linear(x, weight).split(2, dim=-1)
        (a * b + b * c).sum()
    assert elsewhere == [5 * 4 * 4, 5 * 6 * 4]  # x, and the product whose parts were saved


def test_a_tensor_that_changed_in_between_is_copied_again(elsewhere: list[int]) -> None:
    x = torch.ones(4, requires_grad=True)
    factor = torch.full((4,), 2.0)
    with Offload():
        y = x * factor
        factor.mul_(5)
        y = y + x * factor
    y.sum().backward()
    assert len(elsewhere) == 2
    assert torch.equal(x.grad, torch.full((4,), 12.0))  # type: ignore[arg-type]


def test_an_address_that_is_used_again_is_not_taken_for_what_was_there(
    elsewhere: list[int],
) -> None:
    x = torch.ones(64, requires_grad=True)
    y = torch.zeros(64)
    with Offload():
        for value in range(20):  # each factor dies at once, so the allocator reuses its memory
            y = y + x * torch.full((64,), float(value))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((64,), 190.0))  # type: ignore[arg-type]
    assert len(elsewhere) == 20


def test_the_originals_are_freed(elsewhere: list[int]) -> None:
    x = torch.randn(5, 2, 4, requires_grad=True)
    weight = torch.randn(24, 4, requires_grad=True)
    with LiveBytes([x, weight]) as live:
        plain = layer(x, weight)
        before = live.count
        del plain
        gc.collect()
        with Offload([weight]):
            y = layer(x, weight)
        assert live.count < before / 4
        assert y.requires_grad
    assert elsewhere
