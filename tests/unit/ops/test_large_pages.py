"""Copies in large pages are their tensors, and do not overlap."""

import mmap

import pytest
import torch

from megatron.ops import large_pages
from megatron.ops.large_pages import CopiesInLargePages


def test_copies_stay_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_CHUNK", 4096)
    copies = CopiesInLargePages()
    tensors = [torch.randn(size).bfloat16() for size in (5, 700, 1300, 3000, 1)]
    tensors += [torch.randn(3, 7), torch.randn(0)]
    kept = [copies.keep(each) for each in tensors]
    for copy, tensor in zip(kept, tensors):
        assert torch.equal(copy, tensor)
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert all(copy.data_ptr() % 64 == 0 for copy in kept if copy.numel())
    assert len({copy.untyped_storage().data_ptr() for copy in kept}) == 3


def test_memory_outlives_what_gave_it() -> None:
    kept = [CopiesInLargePages().keep(torch.full((1 << 20,), float(at))) for at in range(3)]
    assert [copy.mean().item() for copy in kept] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("advice", [None, 12_345])
def test_a_system_without_large_pages_gives_small_ones(
    monkeypatch: pytest.MonkeyPatch, advice: int | None
) -> None:
    if advice is None:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", advice, raising=False)
    found = large_pages.large_pages(10_000)
    assert found.shape == (10_000,)
    assert not found.any()
