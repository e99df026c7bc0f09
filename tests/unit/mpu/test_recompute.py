"""Tests that recomputation changes no bit, random draws included, and does free memory."""

import gc
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from megatron import device
from megatron.errors import NumericsError
from megatron.mpu.context import ParallelContext
from megatron.mpu.offload import Offload
from megatron.mpu.random import RandomStreams, Samples
from megatron.mpu.recompute import forgetting, recompute, split_over
from megatron.ops.dropout import dropout_add
from tests.support.live_bytes import LiveBytes

Tensors = tuple[torch.Tensor, ...]


def drop(streams: RandomStreams, x: torch.Tensor) -> torch.Tensor:
    """Drop half of `x` [1, n] by the present samples."""
    return dropout_add(x, None, 0.5, torch.tensor(3), streams.rows(1, x.device))


def block(streams: RandomStreams, x: torch.Tensor, y: torch.Tensor, scale: float) -> Tensors:
    """Draws by samples, from a generator of a name and from the default one; two outputs."""
    x = drop(streams, x.exp() * scale)
    with streams.generator("noise"), torch.no_grad():
        noise = torch.rand_like(y)
    return F.dropout(x * y, 0.2).sin(), (x + y + noise).square()


def train(*, recomputing: bool, backwards: int = 1) -> list[torch.Tensor]:
    """Two blocks forward and backward, of other samples; every result and state afterwards."""
    torch.manual_seed(0)
    streams = RandomStreams(5)
    x, y = (torch.randn(1, 64, requires_grad=True) for _ in range(2))
    a, b = x, y
    for number in range(2):
        with streams.of(Samples(number, 1)):
            if recomputing:
                a, b = recompute(lambda *inputs: block(streams, *inputs), streams, a, b, 0.7)
            else:
                a, b = block(streams, a, b, 0.7)
    torch.rand(3)
    with streams.of(Samples(9, 1)):  # as in a pipeline, whose passes are in another order
        for _ in range(backwards):
            (a.sum() + b.sum()).backward(retain_graph=True)
        assert streams.samples == Samples(9, 1)
    return [a, b, x.grad, y.grad, torch.get_rng_state()]


@pytest.mark.parametrize("backwards", [1, 2])
def test_results_gradients_and_states_are_bit_equal(backwards: int) -> None:
    plain = train(recomputing=False, backwards=backwards)
    recomputed = train(recomputing=True, backwards=backwards)
    assert all(torch.equal(left, right) for left, right in zip(plain, recomputed, strict=True))


def test_intermediate_tensors_are_not_kept() -> None:
    saved: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    def wide(x: torch.Tensor) -> torch.Tensor:
        return x.repeat(100).exp().sin().cos().view(100, -1).sum(0)

    x = torch.ones(8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        wide(x)
        plain = sum(shape.numel() for shape in saved)
        saved.clear()
        recompute(wide, RandomStreams(0), x)
    assert plain >= 2400
    assert sum(shape.numel() for shape in saved) <= 8


def test_without_gradients_the_function_is_simply_called() -> None:
    with torch.no_grad():
        assert recompute(lambda value, _: value, RandomStreams(0), "text", None) == "text"


def test_a_region_in_a_region_is_recomputed_with_it() -> None:
    streams, calls = RandomStreams(1), []
    x = torch.linspace(0, 1, 6, requires_grad=True)

    def inner(x: torch.Tensor) -> torch.Tensor:
        calls.append("inner")
        return x.exp().sin()

    def outer(x: torch.Tensor) -> torch.Tensor:
        calls.append("outer")
        return recompute(inner, streams, x.cos()).exp()

    recompute(outer, streams, x).sum().backward()
    other = x.detach().requires_grad_()
    outer_plain = other.cos().exp().sin().exp()
    outer_plain.sum().backward()
    assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]
    assert calls.count("outer") == 2
    assert calls.count("inner") == 3  # with the outer region, and for its own places


def test_parts_of_a_graph_may_go_backward_one_after_the_other() -> None:
    def both(x: torch.Tensor) -> Tensors:
        x = x.exp()
        return x.sin(), x.cos().exp()

    def gradients(run: Callable[[torch.Tensor], Tensors]) -> list[torch.Tensor]:
        x = torch.linspace(0, 1, 6, requires_grad=True)
        one, other = run(x)
        return [
            *torch.autograd.grad(one.sum(), x, retain_graph=True),
            *torch.autograd.grad(other.sum(), x),
        ]

    plain = gradients(both)
    recomputed = gradients(lambda x: recompute(both, RandomStreams(0), x))
    assert all(map(torch.equal, plain, recomputed))


def test_the_second_call_ends_with_the_last_tensor_that_is_needed() -> None:
    reached = []

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.exp()
        reached.append(1)
        return x + 1  # which saves nothing

    recompute(function, RandomStreams(0), torch.ones(3, requires_grad=True)).sum().backward()
    assert reached == [1]


def test_what_was_recomputed_is_not_kept_beside_the_graph() -> None:
    calls = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.exp().sin()

    y = recompute(function, RandomStreams(0), torch.ones(3, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert len(calls) == 3


def test_no_circle_of_references_keeps_what_was_recomputed() -> None:
    x = torch.ones(3, requires_grad=True)
    gc.disable()
    try:
        with LiveBytes() as live:
            recompute(lambda x: x.exp().sin().exp(), RandomStreams(0), x).sum().backward()
            assert x.grad is not None
            assert live.count == x.grad.nbytes
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (lambda x: x.repeat(2).exp(), "torch.Size([6]), torch.float32"),
        (lambda x: x.double().exp(), "torch.float64"),
        (lambda x: x + 1, "fewer tensors than the first time"),
    ],
)
def test_a_second_call_that_saves_other_tensors_is_an_error(
    second: Callable[[torch.Tensor], torch.Tensor], found: str
) -> None:
    functions = iter([torch.exp, second])
    y = recompute(lambda x: next(functions)(x), RandomStreams(0), torch.ones(3, requires_grad=True))
    with pytest.raises(NumericsError, match="saves other tensors the second time") as error:
        y.sum().backward()
    assert found in str(error.value)


def test_no_state_is_read_where_the_device_numbers_the_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in passes that are captured: CUDA refuses to tell a generator's state meanwhile."""
    streams = RandomStreams(5)
    monkeypatch.setattr(device, "default_generator", lambda: pytest.fail("asked for a state"))

    def gradients(recomputing: bool) -> tuple[torch.Tensor, ...]:
        x = torch.linspace(0, 1, 64).unsqueeze(0).requires_grad_()
        with streams.counted_from(torch.tensor(6)), streams.of(Samples(1, 1)):
            y = recompute(drop, streams, streams, x) if recomputing else drop(streams, x)
            return torch.autograd.grad(y.square().sum(), x)

    assert torch.equal(*gradients(True), *gradients(False))


def test_the_compiler_is_not_imported() -> None:
    program = (
        "import sys, torch; from megatron.mpu.random import RandomStreams; "
        "from megatron.mpu.recompute import recompute; "
        "x = torch.ones(3, requires_grad=True); "
        "recompute(torch.exp, RandomStreams(0), x).sum().backward(); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("offloading", [False, True])
def test_inputs_that_are_split_come_back_whole(offloading: bool) -> None:
    tp = ParallelContext.single().tp
    x = torch.randn(3, 5, requires_grad=True)
    count = torch.arange(5)
    with split_over(tp, offload=Offload() if offloading else None):
        y = recompute(lambda x, n: (x * n).exp().sum(), RandomStreams(0), x, count)
    y.backward()
    expected = x.detach().requires_grad_()
    (expected * count).exp().sum().backward()
    assert x.grad is not None
    assert expected.grad is not None
    assert torch.equal(x.grad, expected.grad)


def test_a_forgotten_output_is_made_again_with_the_view_that_was_saved() -> None:
    asked = []
    x, weight = torch.randn(6, 4), torch.randn(4, 4, requires_grad=True)
    other = torch.randn(6, 4, requires_grad=True)

    def again() -> torch.Tensor:
        asked.append(torch.is_grad_enabled())
        return x.exp()

    output = x.exp()
    with forgetting(output, again):
        y = (output[1:5].t() @ other[1:5] @ weight).sum()
    reference = output.clone()
    output.fill_(float("nan"))  # it is not read any more
    y.backward()
    assert asked == [False]
    assert other.grad is not None
    expected = other.detach().requires_grad_()
    (reference[1:5].t() @ expected[1:5] @ weight).sum().backward()
    assert torch.equal(other.grad, expected.grad)  # type: ignore[arg-type]
