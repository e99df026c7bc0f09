"""Blocks keep what was written to them, copies are taken before they are overwritten."""

import pytest
import torch
from torch import Tensor

from megatron.errors import MachineError
from megatron.inference.paged_cache import PagedCache, block_bytes, blocks_for, check_blocks_fit


def cache() -> PagedCache:
    return PagedCache(
        layers=2, blocks=5, groups=3, head_width=4, dtype=torch.float64,
        device=torch.device("cpu"), block_size=2,
    )  # fmt: skip


def numbers(tokens: int, first: float = 1.0) -> Tensor:
    return torch.arange(tokens * 12, dtype=torch.float64).view(tokens, 3, 4) + first


def read(pool: PagedCache, layer: int, *blocks: int) -> tuple[Tensor, Tensor]:
    pool.reserve(len(blocks))
    room = pool.room(len(blocks))
    pool.read(layer, torch.tensor(blocks), room)
    keys, values = room.flatten(1, 2).clone()
    return keys, values


def test_its_size_is_the_formula() -> None:
    pool = cache()
    assert block_bytes(2, 3, 4, torch.float64, 2) == 2 * 2 * 2 * 3 * 4 * 8
    assert pool.num_bytes == (5 + 1) * block_bytes(2, 3, 4, torch.float64, 2)


def test_tokens_land_in_their_slots_and_are_read_in_the_order_of_the_table() -> None:
    pool, new = cache(), numbers(3)
    pool.write(1, torch.tensor([6, 7, 1]), new, -new)  # block 3, then the second slot of block 0
    keys, values = read(pool, 1, 3, 0)
    assert torch.equal(keys, torch.stack([new[0], new[1], torch.zeros(3, 4), new[2]]))
    assert torch.equal(values, -keys)
    assert not any(half.any() for half in read(pool, 0, 3, 0))
    assert not any(half.any() for half in read(pool, 1, pool.null_block))


def test_the_memory_of_a_read_serves_the_next_one() -> None:
    pool = cache()
    pool.reserve(3)
    first = pool.room(3).data_ptr()
    pool.reserve(1)
    assert pool.room(1).data_ptr() == first
    assert pool.room(1).shape == (2, 1, 2, 3, 4)


def test_copies_are_those_of_the_contents_before() -> None:
    pool, new = cache(), numbers(2)
    for layer in range(2):
        pool.write(layer, torch.tensor([0, 1]), new + layer, -new)
        pool.write(layer, torch.tensor([2, 3]), new + 100, -new)
    pool.copy([(0, 1), (1, 4)])  # 4 gets what 1 had, not what it gets from 0
    for layer in range(2):
        assert torch.equal(read(pool, layer, 1)[0], new + layer)
        assert torch.equal(read(pool, layer, 4)[0], new + 100)


def test_cleared_blocks_hold_zeros_in_all_layers() -> None:
    pool = cache()
    pool.pool.fill_(torch.nan)
    pool.clear([0, 3])
    for layer in range(2):
        assert not any(half.any() for half in read(pool, layer, 0, 3))
        assert all(half.isnan().all() for half in read(pool, layer, 1, 2))


def test_tokens_round_up_to_blocks() -> None:
    assert [blocks_for(tokens, 4) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_blocks_that_do_not_fit_are_refused_with_how_many_do() -> None:
    for free in (1000, None):
        check_blocks_fit(10, 100, free, what="a test")
    with pytest.raises(MachineError, match="keys and values of a test do not fit") as raised:
        check_blocks_fit(10, 100, 999, what="a test")
    assert "10 blocks" in str(raised.value)
    assert "at most 9 blocks" in str(raised.value)


def test_blocks_are_saved_and_the_memory_is_given_back_and_taken_again() -> None:
    pool, new = cache(), numbers(4)
    pool.write(1, torch.tensor([2, 3, 8, 9]), new, -new)
    before = read(pool, 1, 1, 4)
    saved = pool.saved((1, 4))
    pool.release()
    assert pool.pool.untyped_storage().size() == 0
    pool.restore((1, 4), saved)
    after = read(pool, 1, 1, 4)
    assert all(torch.equal(one, other) for one, other in zip(before, after))
    assert not torch.stack(read(pool, 0, pool.null_block)).any()


def test_memory_that_is_not_there_any_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = cache()
    pool.release()
    monkeypatch.setattr(PagedCache, "num_bytes", property(lambda self: 1 << 60))
    with pytest.raises(MachineError, match="the memory of the keys and values is not there"):
        pool.restore()
