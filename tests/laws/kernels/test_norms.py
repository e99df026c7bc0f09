"""The law of kernels: each computes what its reference means in fp64, rounded once.

Over dtypes, shapes and strides, for the kernel that a CPU of this machine runs.
"""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.ops.layer_norm import add_layer_norm, layer_norm
from megatron.ops.rms_norm import add_rms_norm, rms_norm
from tests.laws.kernels.norms import (
    DTYPES,
    EPSILON,
    HALVES,
    NORMS,
    Norm,
    Operands,
    backward_operands,
    check_backward,
    check_both,
    check_forward,
)
from tests.support.examples import examples

SHAPES = (
    (0, 8),
    (3, 0),
    (1,),
    (1, 1),
    (5, 1),
    (9, 2),
    (2, 3, 7),
    (4, 16),
    (33, 129),
    (2, 1, 4097),  # one more than a block of a sum
    (2100, 3),  # chunks of more than 16 rows
)
LONG_ROW = (1, 1 << 20)

of_norms = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
of_dtypes = pytest.mark.parametrize("dtypes", DTYPES, ids=str)
functions = pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])


@of_dtypes
@of_norms
def test_kernels_compute_what_the_reference_means(norm, dtypes):
    for number, shape in enumerate(SHAPES):
        for has_residual in (False, True):
            operands = Operands.draw(norm, shape, dtypes, has_residual=has_residual, seed=number)
            check_both(norm, operands)


@of_norms
@given(
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(
        lambda shape: torch.Size(shape).numel() < 20_000
    ),
    dtypes=st.sampled_from(DTYPES),
    has_residual=st.booleans(),
    seed=st.integers(0, 999),
)
@examples(120)
def test_kernels_compute_what_the_reference_means_for_any_shape(
    norm, shape, dtypes, has_residual, seed
):
    check_both(norm, Operands.draw(norm, shape, dtypes, has_residual=has_residual, seed=seed))


@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[2]], ids=str)
@of_norms
def test_a_row_of_a_million_is_as_exact(norm, dtypes):
    check_both(norm, Operands.draw(norm, LONG_ROW, dtypes, has_residual=False))


@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[2], DTYPES[4]], ids=str)
@of_norms
def test_strides_make_no_difference(norm, dtypes):
    dense = Operands.draw(norm, (6, 10, 12), dtypes, has_residual=True)

    def strided(tensor: Tensor) -> Tensor:
        if tensor.dim() == 1:
            return torch.stack([tensor, tensor], dim=1)[:, 0]
        return tensor.transpose(0, 2).contiguous().transpose(0, 2)

    operands = Operands(
        *(strided(tensor) for tensor in (dense.x, dense.residual)),
        tuple(map(strided, dense.vectors)),
        dense.grad[:, :, :1].expand(6, 10, 12),  # as the gradient of a sum is
        strided(dense.grad_added),
    )
    assert not any(one.is_contiguous() for one in (operands.x, operands.grad, *operands.vectors))
    check_both(norm, operands)
    out = norm.kernel()(operands.x, operands.residual, *operands.vectors, EPSILON)[0]
    same = norm.kernel()(dense.x, dense.residual, *dense.vectors, EPSILON)[0]
    assert torch.equal(out, same)


@of_norms
def test_a_row_does_not_depend_on_the_rows_beside_it(norm):
    operands = Operands.draw(norm, (50, 100), DTYPES[2], has_residual=False)
    out = norm.kernel()(operands.x, None, *operands.vectors, EPSILON)[0]
    alone = norm.kernel()(operands.x[31], None, *operands.vectors, EPSILON)[0]
    assert torch.equal(out[31], alone)


@of_norms
def test_results_do_not_depend_on_the_number_of_threads(norm):
    operands = Operands.draw(norm, (700, 150), DTYPES[0], has_residual=True)
    arguments = backward_operands(norm, operands)
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            forward = norm.kernel()(operands.x, operands.residual, *operands.vectors, EPSILON)
            made.append([*forward, *norm.kernel("_backward")(*arguments)])
    finally:
        torch.set_num_threads(before)
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))


@of_norms
def test_infinity_and_nan_pass_through(norm):
    operands = Operands.draw(norm, (3, 9), DTYPES[2], has_residual=False)
    operands.x[1, 4] = float("nan")
    operands.x[2, 4] = float("inf")
    out = norm.kernel()(operands.x, None, *operands.vectors, EPSILON)[0]
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert not out[2, 4].isfinite()


def _call(name: str, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return something of both functions of a norm, in which each result counts."""
    if name == "rms_norm":
        out, added = add_rms_norm(x, residual, weight, EPSILON)
        return out.sin() + added.cos() + rms_norm(x, weight, EPSILON)
    out, added = add_layer_norm(x, residual, weight, bias, EPSILON)
    return out.sin() + added.cos() + layer_norm(x, weight, bias, EPSILON)


def _leaves(norm: Norm, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    drawn = Operands.draw(norm, shape, (dtype, dtype), has_residual=True)
    weight, bias = drawn.vectors[0], drawn.vectors[-1].clone()
    return [one.requires_grad_() for one in (drawn.x, drawn.residual, weight, bias)]


@of_norms
def test_gradients_are_those_of_finite_differences(norm):
    leaves = _leaves(norm, (3, 5), torch.float64)[: 2 + norm.vectors]
    assert torch.autograd.gradcheck(
        lambda x, residual, weight, bias=None: _call(norm.name, x, residual, weight, bias), leaves
    )


@pytest.mark.parametrize("has_residual", [False, True])
@of_norms
def test_operators_keep_the_promises_of_their_schemas(norm, has_residual):
    drawn = Operands.draw(norm, (2, 5), DTYPES[0], has_residual=has_residual)
    vectors = [vector.requires_grad_() for vector in drawn.vectors]
    forward = (drawn.x.requires_grad_(), drawn.residual, *vectors, EPSILON)
    torch.library.opcheck(norm.kernel(), forward)
    arguments = [None if one is None else one.detach() for one in backward_operands(norm, drawn)]
    torch.library.opcheck(norm.kernel("_backward"), tuple(arguments))


@of_norms
def test_a_traced_step_gives_the_same_bits(norm):
    eager, traced = (_leaves(norm, (4, 6), torch.float32) for _ in range(2))
    compiled = torch.compile(_call, backend="aot_eager", fullgraph=True)
    results = [run(norm.name, *ones) for run, ones in ((_call, eager), (compiled, traced))]
    for result in results:
        result.sum().backward()
    assert torch.equal(*results)
    for one, other in zip(eager[: 2 + norm.vectors], traced, strict=False):
        assert torch.equal(one.grad, other.grad)


@of_norms
def test_kernels_refuse_operands_that_they_would_read_out_of_bounds(norm):
    drawn = Operands.draw(norm, (4, 8), DTYPES[0], has_residual=True)
    short = [vector[:-1] for vector in drawn.vectors]
    with pytest.raises(RuntimeError, match="another size, dtype or device"):
        norm.kernel()(drawn.x, None, *short, EPSILON)
    with pytest.raises(RuntimeError, match="another size, dtype or device"):
        norm.kernel()(drawn.x, drawn.residual[:-1], *drawn.vectors, EPSILON)
    with pytest.raises(RuntimeError, match="have one dtype, or one of them is float32"):
        norm.kernel()(drawn.x.double(), None, *drawn.vectors, EPSILON)
    with pytest.raises(RuntimeError, match="kernels take float32"):
        norm.kernel()(drawn.x.int(), None, *drawn.vectors, EPSILON)
    with pytest.raises(RuntimeError, match="one dimension or more"):
        norm.kernel()(torch.tensor(1.0), None, *drawn.vectors, EPSILON)
    arguments = list(backward_operands(norm, drawn))
    for number in (0, 1, 3, *range(4, 4 + norm.statistics)):
        wrong = [*arguments[:number], arguments[number][:-1], *arguments[number + 1 :]]
        with pytest.raises(RuntimeError, match="another size, dtype or device"):
            norm.kernel("_backward")(*wrong)


def _wrong(error: str, norm: Norm, operands: Operands) -> tuple[Tensor, ...]:
    """Return what a forward kernel with one error would make."""
    x, vectors = operands.added, operands.vectors
    out, added, *statistics = norm.forward(operands.x, operands.residual, *vectors, EPSILON)
    if error == "no epsilon":
        return norm.forward(operands.x, operands.residual, *vectors, 0.0)
    if error == "products in half precision":
        mean = statistics[0].unsqueeze(-1).to(x.dtype) if norm.vectors == 2 else 0
        out = (x - mean) * statistics[-1].unsqueeze(-1).to(x.dtype) * vectors[0]
        out = out + vectors[1] if norm.vectors == 2 else out
    if error == "last element forgotten":
        out = out.index_fill(-1, torch.tensor([out.shape[-1] - 1]), 0.0)
    if error == "residual forgotten":
        added = operands.x
    return out, added, *statistics


@pytest.mark.parametrize(
    "error",
    ["no epsilon", "products in half precision", "last element forgotten", "residual forgotten"],
)
@of_norms
def test_the_law_sees_a_wrong_forward_kernel(norm, error):
    drawn = Operands.draw(norm, (40, 33), (HALVES[0],) * 2, has_residual=True)
    # epsilon shows in rows of its size
    drawn = dataclasses.replace(drawn, x=drawn.x * 0.01, residual=drawn.residual * 0.01)
    check_forward(norm, drawn, norm.forward(drawn.x, drawn.residual, *drawn.vectors, EPSILON))
    with pytest.raises(AssertionError):
        check_forward(norm, drawn, _wrong(error, norm, drawn))


@pytest.mark.parametrize("missing", ["mean of the slope", "gradient of the sum", "a row"])
@of_norms
def test_the_law_sees_a_wrong_backward_kernel(norm, missing):
    drawn = Operands.draw(norm, (40, 33), (HALVES[0],) * 2, has_residual=True)
    arguments = backward_operands(norm, drawn)
    made = norm.backward(*arguments)
    check_backward(norm, arguments, made)
    grad, grad_added, x, weight, *statistics = arguments
    if missing == "mean of the slope":
        wide = (grad.float() * weight.float()) * statistics[-1].unsqueeze(-1) + grad_added
        made = (wide.to(x.dtype), *made[1:])
    elif missing == "gradient of the sum":
        made = norm.backward(grad, None, x, weight, *statistics)
    else:
        short = norm.backward(grad[1:], grad_added[1:], x[1:], weight, *(s[1:] for s in statistics))
        made = (made[0], *short[1:])
    with pytest.raises(AssertionError):
        check_backward(norm, arguments, made)
