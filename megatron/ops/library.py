"""The operator library `megatron::`: how an operator is declared, and where its kernels come from.

An operator's reference, in PyTorch, says what it means on every device and in every dtype. The
kernels of csrc/ops take its place on the CPU and on CUDA where `_kernels.so` was built. What a
reader would get wrong: a library built from other source is not registered at all.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from megatron import log
from megatron.ops.cpu_products import MKL, fp32_library

_INTERFACE = 12  # of csrc/ops/library.cpp
_FILE = Path(__file__).with_name("_kernels.so")
_REDUCED = (torch.bfloat16, torch.float16)

P = ParamSpec("P")
R = TypeVar("R")

LIBRARY: Any = torch.library.Library("megatron", "DEF")  # type: ignore[no-untyped-call]


def operator(schema: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare an operator, with the decorated function as its reference for every device.

    The reference has keyword-free parameters as in `schema`, and no gradient of its own.
    """

    def declare(reference: Callable[P, R]) -> Callable[P, R]:
        LIBRARY.define(schema)
        LIBRARY.impl(schema.partition("(")[0], reference, "CompositeExplicitAutograd")
        return reference

    return declare


def shapes_of(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function, which computes no values, for `meta` and fake tensors.

    As `torch.library.register_fake` does, but without its search for the source of the function,
    which took most of the time of importing the operators.
    """

    def declare(shapes: Callable[P, R]) -> Callable[P, R]:
        LIBRARY.impl(name, shapes, "Meta")
        return shapes

    return declare


def gradient_of(
    name: str, backward: Callable[..., tuple[Tensor | None, ...]], save: Callable[..., None]
) -> None:
    """Register the gradient of an operator, whose parameters have no defaults.

    As `torch.library.register_autograd` does for any operator, in less than half of the time of a
    call: where tensors are small, that is most of what an operator takes.

    Args:
        backward: returns the gradients of all parameters, of a context and the outputs' gradients.
        save: takes a context, the `inputs` and the `output`, and keeps there what `backward` needs.
    """
    overload = getattr(torch.ops.megatron, name).default
    has_defaults = any(each.has_default_value() for each in overload._schema.arguments)
    assert not has_defaults  # noqa: S101  # invariant: the dispatcher leaves such arguments out
    below_autograd = torch._C._after_autograd_keyset

    def forward(ctx: Any, *inputs_and_keys: Any) -> Any:
        inputs, keys = inputs_and_keys[:-1], inputs_and_keys[-1]
        with torch._C._AutoDispatchBelowAutograd():
            output = overload.redispatch(keys, *inputs)
        save(ctx, inputs, output)
        return output

    def of_operands(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *backward(ctx, *grads), None

    methods = {"forward": staticmethod(forward), "backward": staticmethod(of_operands)}
    # Profiles show its name.
    function: Any = type(f"megatron_{name}", (torch.autograd.Function,), methods)
    apply: Callable[..., Any] = function.apply

    def with_gradient(keys: torch._C.DispatchKeySet, *inputs: Any) -> Any:
        keys = keys & below_autograd
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            return apply(*inputs, keys)
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys, *inputs)

    LIBRARY.impl(name, with_gradient, "Autograd", with_keyset=True)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over elements of `x`: float32, or float64 where `x` is."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_row_operands(x: Tensor, residual: Tensor | None, *vectors: Tensor) -> None:
    """Check that `vectors` span the rows of `x`, and that their dtypes have a kernel.

    Raises:
        ValueError: a shape or a dtype does not fit, with what was found and what fits.
    """
    shape, dtype = (x.shape[-1:], vectors[0].dtype)
    if x.dim() == 0 or any(vector.shape != shape for vector in vectors):
        shapes = ", ".join(str(tuple(vector.shape)) for vector in vectors)
        raise ValueError(
            "a weight or bias does not span the last dimension of x\n"
            f"  found: x {tuple(x.shape)}; {shapes}\n"
            f"  fix: give vectors of {x.shape[-1] if x.dim() else 'as many'} elements"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            "x and its residual differ\n"
            f"  found: {tuple(x.shape)} {x.dtype}; {tuple(residual.shape)} {residual.dtype}\n"
            "  fix: give both one shape and one dtype"
        )
    fits = x.dtype == dtype or {x.dtype, dtype} in [{torch.float32, half} for half in _REDUCED]
    if not fits or any(vector.dtype != dtype for vector in vectors):
        raise ValueError(
            "no operator takes these dtypes together\n"
            f"  found: x {x.dtype}; {', '.join(str(vector.dtype) for vector in vectors)}\n"
            "  fix: give one dtype to all, or float32 to x or to weight and bias"
        )


def register_norm_gradient(name: str) -> None:
    """Register `{name}_backward` as the gradient of a norm that takes x, a residual and weights.

    The norm returns its output, the sum with the residual and statistics; `{name}_backward` takes
    the gradients of the first two, what was normalised, the weight and the statistics.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, residual, weight, *_ = inputs
        _, added, *statistics = output
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        ctx.has_residual, ctx.weights = residual is not None, len(inputs) - 3  # and epsilon
        ctx.save_for_backward(added if ctx.has_residual else x, weight, *statistics)

    def backward(
        ctx: Any, grad: Tensor | None, grad_added: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        if not ctx.has_residual:
            grad_added = None  # of the empty tensor
        if grad is None:
            return grad_added, grad_added, *[None] * ctx.weights, None
        gradients = getattr(torch.ops.megatron, f"{name}_backward")
        grad_x, *of_weights = gradients(grad, grad_added, *ctx.saved_tensors)
        return grad_x, grad_x if ctx.has_residual else None, *of_weights, None

    gradient_of(name, backward, save)


def kernels_in_use() -> str:
    """Return what results depend on in their last bits.

    The instruction set; "cuda" if there are kernels for it too; and what multiplies fp32 matrices,
    if that is not PyTorch's own choice.
    """
    names = [INSTRUCTION_SET or "none"]
    if torch._C._dispatch_has_kernel_for_dispatch_key("megatron::rms_norm", "CUDA"):
        names.append("cuda")
    if (products := fp32_library()) != MKL:
        names.append(f"(fp32 products: {products})")
    return " ".join(names)


def announce_kernels() -> None:
    """Log the kernels in use, or warn once that there are none; for the start of a training."""
    if INSTRUCTION_SET is not None:
        log.info(f"kernels: {kernels_in_use()}")
        return
    what = "was built from other source" if _FILE.exists() else "is not built"
    log.warning_once(
        "compiled ops",
        f"megatron/ops/{_FILE.name} {what}; operators run as PyTorch code (same results within "
        "rounding, slower): python setup.py build_ext --inplace builds it",
    )


def _register_kernels(file: Path) -> str | None:
    """Register the kernels of `file`, and return the instruction set of those of the CPU.

    Returns None, and registers nothing, if the file is missing or was built from other source.
    """
    try:
        kernels = ctypes.CDLL(str(file))
    except OSError:
        return None
    if kernels.megatron_ops_interface() != _INTERFACE:
        return None
    kernels.megatron_ops_register()
    kernels.megatron_ops_instruction_set.restype = ctypes.c_char_p
    return str(kernels.megatron_ops_instruction_set().decode())


# plain, avx2 or avx512, on which the last bits of results depend; None where references run.
INSTRUCTION_SET = _register_kernels(_FILE)
