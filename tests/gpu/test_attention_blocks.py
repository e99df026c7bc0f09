"""Parts of attention on CUDA, by torch's flash kernel and by the reference, add up to the whole."""

import pytest
import torch
import torch.nn.functional as F

from megatron import device
from megatron.ops.attention_blocks import attend_block, attend_block_gradients, merge_

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # Outputs of blocks and gradients are rounded to the dtype before they are added up.
    [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)],
)
def test_parts_add_up_to_the_whole(dtype: torch.dtype, tolerance: float, masked: bool) -> None:
    here = device.select("cuda", 0)
    q, k, v = (torch.randn(2, 8, 64, 64, device=here, dtype=dtype) for _ in range(3))
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool, device=here).tril() if masked else None
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
    grad = torch.randn_like(q)
    gradients = torch.autograd.grad(expected, leaves, grad)
    parts = [slice(0, 24), slice(24, None)]
    given = [(k[:, :, p], v[:, :, p], None if mask is None else mask[..., p]) for p in parts]
    out, sums = attend_block(q, *given[0], causal=False)
    out = out.float()
    merge_(out, sums, *attend_block(q, *given[1], causal=False))
    out = out.to(dtype)
    found = [
        attend_block_gradients(grad, (q, keys, values), out, sums, part, causal=False)
        for keys, values, part in given
    ]
    of_q, of_k, of_v = zip(*found)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(out, expected, **close)
    for one, other in zip((sum(of_q), torch.cat(of_k, 2), torch.cat(of_v, 2)), gradients):
        torch.testing.assert_close(one, other, **close)
