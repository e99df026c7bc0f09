"""What is registered, what is refused, and what is said without kernels."""

from types import SimpleNamespace

import pytest
import torch

from megatron.ops import library
from megatron.ops.library import check_row_operands, gradient_of, operator, statistics_dtype


def _library_of(interface, calls):
    def instruction_set():
        return b"avx2"

    return SimpleNamespace(
        megatron_ops_instruction_set=instruction_set,
        megatron_ops_interface=lambda: interface,
        megatron_ops_register=lambda: calls.append("registered"),
    )


@pytest.mark.parametrize("built_from", ["this source", "other source"])
def test_kernels_are_registered_only_if_they_are_of_this_source(built_from, monkeypatch, tmp_path):
    calls = []
    interface = library._INTERFACE + (built_from == "other source")
    monkeypatch.setattr(library.ctypes, "CDLL", lambda _: _library_of(interface, calls))
    expected = "avx2" if built_from == "this source" else None
    assert library._register_kernels(tmp_path) == expected
    assert calls == ["registered"] * (built_from == "this source")


def test_a_missing_library_is_no_error(tmp_path):
    assert library._register_kernels(tmp_path / "_kernels.so") is None


@pytest.mark.parametrize("built", ["none", "other source"])
def test_a_training_without_kernels_says_so_once(built, monkeypatch, tmp_path, capsys):
    file = tmp_path / "_kernels.so"
    if built == "other source":
        file.touch()
    monkeypatch.setattr(library, "_FILE", file)
    monkeypatch.setattr(library, "INSTRUCTION_SET", None)
    for _ in range(2):
        library.announce_kernels()
    output = capsys.readouterr().err
    assert output.count("operators run as PyTorch code") == 1
    assert ("is not built" if built == "none" else "was built from other source") in output
    assert "python setup.py build_ext --inplace" in output


@pytest.mark.parametrize(("has_cuda", "name"), [(False, "plain"), (True, "plain cuda")])
def test_a_training_with_kernels_says_which(monkeypatch, capsys, has_cuda, name):
    monkeypatch.setattr(library, "INSTRUCTION_SET", "plain")
    query = "_dispatch_has_kernel_for_dispatch_key"
    monkeypatch.setattr(torch._C, query, lambda operator, key: has_cuda and key == "CUDA")
    library.announce_kernels()
    output = capsys.readouterr()
    assert f"kernels: {name}\n" in output.out + output.err
    assert "not built" not in output.err
    monkeypatch.setattr(library, "fp32_library", lambda: "oneDNN")
    assert library.kernels_in_use() == f"{name} (fp32 products: oneDNN)"


def test_operands_with_defaults_get_no_gradient():
    operator("scaled_of_a_test(Tensor x, float factor=2.0) -> Tensor")(torch.mul)
    with pytest.raises(AssertionError):
        gradient_of("scaled_of_a_test", lambda ctx, grad: (grad, None), lambda *_: None)


def test_a_gradient_is_only_prepared_where_one_is_wanted():
    kept = []

    def save(ctx, inputs, output):
        kept.append(inputs)

    operator("doubled_of_a_test(Tensor x, int unused) -> Tensor")(lambda x, unused: 2 * x)
    gradient_of("doubled_of_a_test", lambda ctx, grad: (2 * grad, None), save)
    x = torch.ones(3, requires_grad=True)
    doubled = torch.ops.megatron.doubled_of_a_test
    doubled(x.detach(), 1)
    with torch.no_grad():
        doubled(x, 1)
    assert not kept
    doubled(x, 1).sum().backward()
    assert [unused for _, unused in kept] == [1]
    assert x.grad.tolist() == [2.0] * 3


def test_statistics_are_never_of_half_precision():
    kept = [statistics_dtype(torch.empty(0, dtype=dtype)) for dtype in library._REDUCED]
    assert kept == [torch.float32, torch.float32]
    assert statistics_dtype(torch.empty(0, dtype=torch.float64)) == torch.float64


@pytest.mark.parametrize(
    ("x", "vectors"),
    [((2, 4), [(3,)]), ((), [(1,)]), ((2, 4), [(4,), (1,)]), ((4,), [(1, 4)])],
    ids=str,
)
def test_vectors_of_another_length_are_refused(x, vectors):
    with pytest.raises(
        ValueError, match=r"does not span the last dimension of x\n  found: .*\n  f"
    ):
        check_row_operands(torch.empty(x), None, *map(torch.empty, vectors))


@pytest.mark.parametrize("other", [torch.empty(2, 1), torch.empty(2, 4, dtype=torch.bfloat16)])
def test_a_residual_unlike_x_is_refused(other):
    with pytest.raises(
        ValueError, match=r"x and its residual differ\n  found: .*\n  fix: give both"
    ):
        check_row_operands(torch.empty(2, 4), other, torch.empty(4))


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float32, torch.int32),
    ],
    ids=str,
)
def test_dtypes_without_a_kernel_are_refused(dtypes):
    x, *vectors = (torch.empty(4, dtype=dtype) for dtype in dtypes)
    with pytest.raises(ValueError, match="no operator takes these dtypes together\n  found: x"):
        check_row_operands(x, None, *vectors)
