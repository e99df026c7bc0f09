"""State in host memory: how it is cut into parts, and that all of it comes and goes back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.optimizer.host_state import HostState, first_share, parts_of
from tests.support.examples import examples


@given(
    sizes=st.lists(st.integers(0, 200), max_size=12),
    largest=st.integers(1, 12).map(lambda grains: 16 * grains),
)
@examples(200)
def test_parts_hold_every_element_once_in_order_and_fit(sizes: list[int], largest: int) -> None:
    parts = list(parts_of(sizes, largest))
    held = [(at, i) for part in parts for at, start, stop in part for i in range(start, stop)]
    assert held == [(at, i) for at, size in enumerate(sizes) for i in range(size)]
    rooms = [sum(-(-(stop - start) // 16) * 16 for _, start, stop in part) for part in parts]
    assert all(0 < room <= largest for room in rooms)
    assert all(room == largest for room in rooms[:-1])


@pytest.mark.parametrize(
    ("fraction", "count"), [(0.0, 0), (0.09, 0), (0.1, 1), (0.5, 1), (0.6, 2), (0.99, 2), (1.0, 3)]
)
def test_the_first_tensors_up_to_the_fraction_are_taken(fraction: float, count: int) -> None:
    assert first_share([10, 50, 40], fraction) == count


def test_of_nothing_nothing_is_taken() -> None:
    assert first_share([], 0.5) == 0
    assert list(HostState().parts([])) == []


def test_what_is_kept_is_a_copy_and_copies_do_not_overlap() -> None:
    host, tensors = HostState(), []
    for size, dtype in ((5, torch.float32), (3, torch.bfloat16), (7, torch.float64)):
        tensors.append(torch.randn(size, 2).to(dtype))
    kept = [host.keep(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, kept):
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() % 64 == 0
    for copy in kept:
        copy.zero_()
    assert all(tensor.any() for tensor in tensors)
    kept[1].fill_(1)
    assert not kept[0].any()
    assert not kept[2].any()


def test_parts_come_are_changed_and_go_back() -> None:
    host = HostState(part_bytes=16 * (4 + 2))  # of sixteen elements
    sizes = (20, 1, 30)
    wide = [host.keep(torch.arange(size, dtype=torch.float32)) for size in sizes]
    narrow = [host.keep(torch.zeros(size, dtype=torch.bfloat16)) for size in sizes]
    for _ in range(2):  # what went back is what comes the next time
        seen = 0
        for pieces, tensors in host.parts([list(pair) for pair in zip(wide, narrow)]):
            for (_, start, stop), (first, second) in zip(pieces, tensors, strict=True):
                assert first.shape == second.shape == (stop - start,)
                seen += len(first)
                first += 1
                second += 2
        assert seen == sum(sizes)
    host.settle()
    for size, one, other in zip(sizes, wide, narrow):
        assert torch.equal(one, torch.arange(size) + 2.0)
        assert torch.equal(other, torch.full((size,), 4, dtype=torch.bfloat16))
