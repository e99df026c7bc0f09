"""FLOPs and bytes that are alive, while operations make them."""

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from megatron.ops.attention import attend_by_products
from megatron.optimizer.releasable import ReleasableTensor
from megatron.planning.calls import Phases
from megatron.planning.meter import OpMeter

DEVICES = ("cpu", "meta")


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_count_while_a_tensor_is_alive_and_views_do_not(device: str) -> None:
    with OpMeter(Phases()) as meter:
        kept = torch.zeros(100, device=device)
        view = kept.view(10, 10)
        passing = torch.zeros(1000, dtype=torch.float64, device=device)
        assert meter.live() == 400 + 8000
        del passing
        assert meter.live() == 400
        assert meter.reading() == ({}, 8400)
        view = view + 1
        del view
        assert meter.reading() == ({}, 800)


def test_memory_that_comes_and_goes_is_followed() -> None:
    with OpMeter(Phases()) as meter:
        flat = ReleasableTensor(1000, dtype=torch.float32, device=torch.device("meta"))
        assert meter.live() == 0
        meter.reading()
        flat.take()
        flat.tensor.add_(1)
        assert meter.reading() == ({}, 4000)
        flat.release()
        assert meter.live() == 0


def test_flops_are_those_of_products_by_phase() -> None:
    phases = Phases()
    left = torch.empty(4, 5, device="meta", requires_grad=True)
    right = torch.empty(5, 6, device="meta", requires_grad=True)
    with OpMeter(phases) as meter:
        with phases("forward-compute"):
            product = left @ right
        with phases("backward-compute"):
            product.sum().backward()
    once = 2 * 4 * 5 * 6
    flops, _ = meter.reading()
    assert flops == {"forward-compute": once, "backward-compute": 2 * once}


def test_attention_counts_all_scores_once_forward_and_twice_backward() -> None:
    phases = Phases()
    q = torch.empty(2, 4, 16, 8, device="meta", requires_grad=True)
    k, v = (torch.empty(2, 2, 16, 8, device="meta", requires_grad=True) for _ in range(2))
    with OpMeter(phases) as meter:
        with phases("forward-compute"):
            out = attend_by_products(q, k, v, True)
        with phases("backward-compute"):
            out.sum().backward()
    once = 2 * 2 * 2 * 4 * 16 * 16 * 8
    flops, _ = meter.reading()
    assert flops == {"forward-compute": once, "backward-compute": 2 * once}


class _Blocks(Function):
    """Attention over a part of the keys, as ranks of cp compute it."""

    @staticmethod
    def forward(ctx: object, q: Tensor) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out: Tensor = flash(q, q, q, 0.0, True)[0]
        return out


def test_blocks_of_attention_count_too() -> None:
    with OpMeter(Phases()) as meter:
        _Blocks.apply(torch.empty(1, 2, 16, 8, device="meta"))
    assert meter.reading()[0] == {"between": 2 * 2 * 2 * 16 * 16 * 8}
