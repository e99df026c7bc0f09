"""Which attention over blocks has a kernel; what it computes is in the law of kernels."""

import pytest
import torch

from megatron.ops import block_attention
from megatron.ops.block_attention import block_attention_reference, has_block_attention

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "device", "width", "block", "expected"),
    [
        (torch.float32, "cpu", 64, 32, True),
        (torch.bfloat16, "cpu", 512, 256, True),
        (torch.float16, "cpu", 64, 32, False),
        (torch.float64, "cpu", 64, 32, False),
        (torch.float32, "meta", 64, 32, False),
        (torch.float32, "cpu", 24, 32, False),
        (torch.float32, "cpu", 64, 8, False),
        (torch.float32, "cpu", 528, 32, False),
        (torch.float32, "cpu", 64, 272, False),
    ],
)
def test_sizes_and_types_that_have_a_kernel(
    dtype: torch.dtype,
    device: str,
    width: int,
    block: int,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_attention.library, "INSTRUCTION_SET", "plain")
    assert has_block_attention(dtype, torch.device(device), width, block) == expected
    monkeypatch.setattr(block_attention.library, "INSTRUCTION_SET", None)
    assert not has_block_attention(dtype, torch.device(device), width, block)


def test_the_reference_is_the_formula() -> None:
    """Two tokens of a sequence: the second sees both, each with its share."""
    q, k, v = (
        torch.randn(shape, dtype=torch.float64) for shape in ((2, 1, 1, 4), (2, 1, 4), (2, 1, 4))
    )
    pool = torch.zeros(2, 1, 2, 1, 4, dtype=torch.float64)
    places = [torch.tensor(each) for each in ([0, 1], [[0, 0, 0, 2, 0, 0]], [0])]
    found = block_attention_reference(q, k, v, pool, *places, 0)
    shares = torch.softmax(k[:, 0] @ q[1, 0, 0] / 2, dim=0)
    torch.testing.assert_close(found[1, 0, 0], shares @ v[:, 0])
    torch.testing.assert_close(found[0, 0, 0], v[0, 0])
    alone = block_attention_reference(q, k, v, pool, *places, 1)
    torch.testing.assert_close(alone[:, 0, 0], v[:, 0])


def test_shapes_are_known_without_values() -> None:
    with torch.device("meta"):
        q, k = torch.empty(3, 2, 4, 16), torch.empty(3, 2, 16)
        pool, places = torch.empty(2, 5, 32, 2, 16), torch.empty(3, dtype=torch.int64)
        found = block_attention.block_attention((q, k, k), pool, (places, places, places), window=0)
    assert found.shape == q.shape
