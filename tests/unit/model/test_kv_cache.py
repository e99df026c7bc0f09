"""Rows of the cache grow each at its own position."""

from typing import Any

import pytest
import torch

from megatron.errors import MachineError
from megatron.model import kv_cache
from megatron.model.kv_cache import KVCache


def cache() -> KVCache:
    return KVCache(
        layers=2, batch=2, groups=3, capacity=5, head_width=4,
        dtype=torch.float64, device=torch.device("cpu"),
    )  # fmt: skip


def test_its_size_is_the_formula() -> None:
    assert cache().num_bytes == 2 * 2 * 2 * 3 * 5 * 4 * 8
    assert cache().capacity == 5


def test_new_tokens_land_at_each_rows_own_position() -> None:
    filled, prompt = cache(), torch.randn(2, 3, 3, 4, dtype=torch.float64)
    filled.keep_prompt(1, prompt, -prompt)
    filled.length = 4
    new = torch.randn(2, 3, 1, 4, dtype=torch.float64)
    keys, values = filled.extend(1, new, -new, torch.tensor([[1], [3]]))
    assert keys.shape == (2, 3, 4, 4)
    assert torch.equal(keys[0, :, 1], new[0, :, 0])
    assert torch.equal(keys[1, :, 3], new[1, :, 0])
    assert torch.equal(keys[0, :, 0], prompt[0, :, 0])
    assert torch.equal(keys[1, :, :3], prompt[1])
    assert torch.equal(values, -keys)
    assert not filled.keys[0].any()


@pytest.mark.parametrize(
    ("free", "fix"), [(1279, "at most 3 rows"), (320, "at most 1 rows"), (319, "most 9 tokens")]
)
def test_what_is_larger_than_free_memory_is_refused_with_what_fits(
    monkeypatch: pytest.MonkeyPatch, free: int, fix: str
) -> None:
    sizes: dict[str, Any] = {"layers": 2, "groups": 1, "capacity": 10, "head_width": 2}
    sizes |= {"dtype": torch.float32, "device": torch.device("cpu")}
    monkeypatch.setattr(kv_cache, "free_memory_bytes", lambda: free)
    with pytest.raises(MachineError, match="do not fit into memory") as raised:
        KVCache(batch=4, **sizes)
    assert "4 rows of 10 tokens" in str(raised.value)
    assert fix in str(raised.value)
    for enough in (1280, None):
        monkeypatch.setattr(kv_cache, "free_memory_bytes", lambda enough=enough: enough)
        assert KVCache(batch=4, **sizes).num_bytes == 1280
