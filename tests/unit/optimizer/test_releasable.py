"""Tests of megatron.optimizer.releasable."""

import torch

from megatron.optimizer.releasable import ReleasableTensor


def test_memory_comes_and_goes_under_the_same_views() -> None:
    room = ReleasableTensor(6, dtype=torch.float64, device=torch.device("cpu"))
    assert not room.is_taken
    room.take()
    view = room.tensor[2:].view(2, 2)
    room.tensor.fill_(1.0)
    room.take()  # it has memory already, and keeps what is in it
    assert room.tensor.tolist() == [1.0] * 6
    room.release()
    assert room.tensor.untyped_storage().nbytes() == 0
    room.take()
    room.tensor.copy_(torch.arange(6.0))
    assert view.tolist() == [[2.0, 3.0], [4.0, 5.0]]


def test_what_autograd_saved_is_what_was_written_last() -> None:
    room = ReleasableTensor(4, dtype=torch.float32, device=torch.device("cpu"))
    room.take()
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    weight.data = room.tensor.view(2, 2)
    room.tensor.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    inputs = torch.ones(1, 2, requires_grad=True)
    output = (inputs @ weight.t()).sum()
    room.release()
    room.take()
    room.tensor.copy_(torch.tensor([10.0, 20.0, 30.0, 40.0]))
    output.backward()
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [[40.0, 60.0]]
