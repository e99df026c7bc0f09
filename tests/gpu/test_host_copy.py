"""The copy that is written beside the training, from a GPU: pinned, complete, nobody else's."""

import pytest
import torch

from megatron import device
from megatron.checkpoint.save.host_copy import HostMemory
from megatron.checkpoint.sharded import ShardedTensor, Snapshot

pytestmark = pytest.mark.gpu


def test_a_copy_from_a_gpu_is_complete_and_does_not_follow_the_original() -> None:
    here = device.select("cuda", 0)
    weight = torch.randn(1 << 20, device=here)
    halves = torch.randn(512, 512, device=here).bfloat16()
    tensors = (ShardedTensor.of("model/a", weight), ShardedTensor.of("model/b", halves.T))
    expected = [weight.cpu(), halves.T.cpu()]
    memory = HostMemory()
    memory.make_room(weight.nbytes + halves.nbytes)
    made = memory._bytes.data_ptr()
    copied = memory.copy_of(Snapshot(tensors, progress={}, config={}))
    weight.zero_()
    halves.zero_()
    assert memory._bytes.data_ptr() == made, "made before, not in the copy"
    views = [tensor.parts[0].view for tensor in copied.tensors]
    assert all(view.is_pinned() for view in views)
    assert all(torch.equal(view, one) for view, one in zip(views, expected, strict=True))
