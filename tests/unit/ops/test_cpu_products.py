"""Products in half precision without instructions for them, and the library of those in fp32."""

from collections.abc import Iterator

import pytest
import torch

from megatron.mpu.weight_gradients import add_product, weight_gradient
from megatron.ops import cpu_products
from megatron.ops.attention import attend, attend_by_torch
from megatron.ops.cpu_products import (
    MKL,
    ONEDNN,
    fp32_library,
    fp32_products_are_exact,
    is_widened,
    matrix_product,
    onednn_is_faster_in_fp32,
    take_faster_fp32_library,
)
from megatron.ops.row_products import linear_rows

SHAPES = [(7, 5, 3), (3, 5, 70), (70, 5, 3), (3, 70, 5), (4, 4, 4), (0, 5, 3), (3, 0, 5)]
DTYPES = [torch.bfloat16, torch.float16]
LARGE = {"tokens": 2**20, "hidden_size": 64, "head_width": 64}


@pytest.fixture(autouse=True)
def no_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that multiplies neither dtype, and blocks that are smaller than the matrices."""
    monkeypatch.setattr(cpu_products, "onednn_multiplies", lambda dtype: dtype.itemsize > 2)
    monkeypatch.setattr(cpu_products, "_BLOCK_ELEMENTS", 64)


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_rounded_once(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    n, k, m = shape
    a, b, bias = (torch.randn(*size).to(dtype) for size in ((n, k), (k, m), (m,)))
    before = a.clone(), b.clone()
    half_ulp = torch.finfo(dtype).eps / 2
    for given in (None, bias):
        expected = exact(a, b) + (0 if given is None else given.double())
        # Sums in fp32 of numbers of size 1, which may end on the other side of a midpoint.
        close = {"rtol": 1.01 * half_ulp, "atol": 1e-5}
        torch.testing.assert_close(matrix_product(a, b, given).double(), expected, **close)
        place = torch.full((n, m), torch.nan, dtype=dtype)
        assert matrix_product(a, b, given, out=place) is place
        torch.testing.assert_close(place.double(), expected, **close)
        transposed = matrix_product(a.t().contiguous().t(), b.t().contiguous().t(), given)
        torch.testing.assert_close(transposed.double(), expected, **close)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


def test_half_precision_alone_is_widened() -> None:
    assert [is_widened(torch.empty(1, dtype=dtype)) for dtype in DTYPES] == [True, True]
    assert not is_widened(torch.empty(1))
    assert not is_widened(torch.empty(1, dtype=torch.bfloat16, device="meta"))
    a, b = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    assert torch.equal(matrix_product(a, b), a @ b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_weights_are_added_up_in_the_dtype_of_the_sum(dtype: torch.dtype) -> None:
    rows_in, rows_out = torch.randn(9, 20).bfloat16(), torch.randn(9, 30).bfloat16()
    product = matrix_product(rows_out.t(), rows_in)
    assert torch.equal(weight_gradient(rows_in, rows_out), product)
    total = torch.full((30, 20), torch.nan, dtype=dtype)
    for count in (1, 2):
        add_product(total, rows_out, rows_in, is_first=count == 1)
        assert torch.equal(total, count * product.to(dtype))


def test_a_linear_layer_computes_as_it_does_under_autograd() -> None:
    rows, weight = torch.randn(3, 2, 5).bfloat16(), torch.randn(7, 5).bfloat16()
    bias = torch.randn(7).bfloat16()
    with torch.no_grad():
        found = linear_rows(rows, weight, bias)
    torch.testing.assert_close(found, linear_rows(rows, weight, bias), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("masked", [None, "bool", "float"])
def test_attention_has_the_gradients_of_fp32(masked: str | None) -> None:
    drawn = [torch.randn(2, heads, 40, 8).bfloat16() for heads in (4, 2, 2)]
    mask = torch.rand(2, 1, 40, 40) > 0.2
    if masked == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -1e4).bfloat16()
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (t.to(dtype).requires_grad_() for t in drawn)
        if masked is None:
            out = attend(q, k, v, causal=True)
        else:
            given = mask.to(dtype) if masked == "float" else mask
            out = attend_by_torch(q, k, v, causal=False, mask=given)
        assert out.dtype == dtype
        slope = torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)
        results.append([t.float() for t in (out, *torch.autograd.grad(out, (q, k, v), slope))])
    for one, other in zip(*results):
        # The output of bfloat16 is rounded, and enters the gradients: three parts in 2^8.
        torch.testing.assert_close(one, other, rtol=3 * 2**-8, atol=3 * 2**-8)


@pytest.mark.parametrize(
    ("vendor", "features", "is_faster"),
    [
        ("AuthenticAMD", {"avx2", "avx512_f"}, True),
        ("AuthenticAMD", {"avx2"}, False),
        ("GenuineIntel", {"avx2", "avx512_f"}, False),
        ("AuthenticAMD", {"avx2", "avx512_f", "amx_tile"}, False),
        ("", {"avx2", "avx512_f"}, False),
    ],
)
def test_onednn_is_for_wide_instructions_of_others_than_intel(
    vendor: str, features: set[str], is_faster: bool
) -> None:
    assert onednn_is_faster_in_fp32(vendor, features) == is_faster


@pytest.fixture
def faster_by_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that oneDNN multiplies fp32 on faster, and exactly."""
    monkeypatch.setattr(cpu_products, "onednn_is_faster_in_fp32", lambda *_: True)
    monkeypatch.setattr(cpu_products, "fp32_products_are_exact", lambda: True)
    before = cpu_products._FP32.fp32_precision
    yield
    cpu_products._FP32.fp32_precision = before


@pytest.mark.usefixtures("faster_by_onednn")
def test_onednn_multiplies_until_that_is_undone() -> None:
    assert fp32_library() == MKL
    undo = take_faster_fp32_library(**LARGE)
    assert fp32_library() == ONEDNN
    undo()
    assert fp32_library() == MKL
    assert torch.get_float32_matmul_precision() == "highest", "as if nothing had been set"


@pytest.mark.usefixtures("faster_by_onednn")
def test_mkl_multiplies_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "onednn_is_faster_in_fp32", lambda *_: False)
    take_faster_fp32_library(**LARGE)
    assert fp32_library() == MKL


@pytest.mark.usefixtures("faster_by_onednn")
def test_mkl_multiplies_small_matrices() -> None:
    take_faster_fp32_library(tokens=2**8 - 1, hidden_size=2**7, head_width=2**5)
    assert fp32_library() == MKL
    take_faster_fp32_library(tokens=2**8, hidden_size=2**7, head_width=2**5)
    assert fp32_library() == ONEDNN


@pytest.mark.usefixtures("faster_by_onednn")
def test_a_precision_that_somebody_has_set_stays() -> None:
    cpu_products._FP32.fp32_precision = "ieee"
    undo = take_faster_fp32_library(**LARGE)
    assert cpu_products._FP32.fp32_precision == "ieee"
    undo()
    assert cpu_products._FP32.fp32_precision == "ieee"


@pytest.mark.usefixtures("faster_by_onednn")
def test_mkl_multiplies_where_onednn_rounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_products, "fp32_products_are_exact", lambda: False)
    undo = take_faster_fp32_library(**LARGE)
    assert fp32_library() == MKL
    assert "oneDNN rounds operands of products in fp32 on this CPU" in capsys.readouterr().err
    undo()


def keep_bits(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return fp32 numbers with that many of their 24 bits."""
    mantissa, exponent = torch.frexp(tensor)
    return torch.ldexp((mantissa * 2**count).round() / 2**count, exponent)


@pytest.mark.parametrize("bits", [8, 11, 24])
@pytest.mark.parametrize("rounded", [(0,), (1,), (0, 1)])
def test_a_product_with_rounded_operands_is_noticed(
    monkeypatch: pytest.MonkeyPatch, bits: int, rounded: tuple[int, ...]
) -> None:
    """Of bf16, tf32 and fp32, of one operand or both."""
    multiply = torch.Tensor.__matmul__

    def with_rounding(*operands: torch.Tensor) -> torch.Tensor:
        if operands[0].is_floating_point():
            operands = tuple(
                keep_bits(each, bits) if at in rounded else each for at, each in enumerate(operands)
            )
        return multiply(*operands)

    monkeypatch.setattr(torch.Tensor, "__matmul__", with_rounding)
    assert fp32_products_are_exact() == (bits == 24)
