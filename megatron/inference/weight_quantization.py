"""Weights of a model in 8 bits, for inference: which of them, and what that costs in accuracy.

The weights of linear layers are replaced one by one. Embeddings (with a head that is tied to them),
norms, biases and routers stay as they are.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.model.gpt_model import GPTModel
from megatron.ops.quantized_products import QuantizedProduct, StoredFormat
from megatron.ops.row_products import product_in_use

_MIB = 1 << 20
_ROWS = 16  # random ones, by which errors of products are measured


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """What became of the weights of this rank.

    Attributes:
        weights: how many were replaced.
        bytes_before: of all weights of the model.
        bytes_after: the same now, with scales.
        mean_error: of products, relative to the exact ones, for random rows.
        worst_error: the largest of them, which `worst` has.
    """

    stored: StoredFormat
    weights: int
    bytes_before: int
    bytes_after: int
    mean_error: float
    worst_error: float
    worst: str

    def __str__(self) -> str:
        return (
            f"{self.weights} weights are stored as {self.stored}: the model takes "
            f"{self.bytes_after / _MIB:.1f} MiB in place of {self.bytes_before / _MIB:.1f}; "
            f"relative error of products "
            f"{self.mean_error:.2%}, at most {self.worst_error:.2%} ({self.worst})"
        )


@torch.no_grad()
def quantize_weights(model: GPTModel, stored: StoredFormat) -> QuantizationReport:
    """Store the weights of a model's linear layers in 8 bits.

    The model can be neither trained nor saved then, nor can its weights be exchanged: values mean
    nothing without their scales, so its `state_dict()` is a ConfigError.

    Raises:
        ConfigError: the model has gradients, computes in FP8, or its weights are in 8 bits.
    """
    if any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "weights of a model that has gradients cannot be stored in 8 bits",
            found=f"--weight-quantization {stored}, parameters with requires_grad",
            fix="load it with load_model_for_inference()",
        )
    if model.build.fp8 is not None:
        raise ConfigError(
            "a model that computes in FP8 cannot store its weights in 8 bits as well",
            found=f"--weight-quantization {stored}, and FP8 in the flags of the model",
            fix="leave --weight-quantization out",
        )
    before = _bytes_of(model)
    errors: dict[str, float] = {}
    for name, weight in model.named_parameters():
        if not _is_quantized(name, weight):
            continue
        if not weight.is_floating_point() or weight.element_size() == 1:
            raise ConfigError(
                "the weights of the model are stored in 8 bits already",
                found=f"{name} in {weight.dtype}",
                fix="quantize a model once",
            )
        product = QuantizedProduct(weight, stored)
        errors[name] = _product_error(weight, product)
        weight.data = product.values
        weight.row_product = product  # type: ignore[attr-defined]
    model.register_state_dict_pre_hook(_refuse_state)  # type: ignore[no-untyped-call]
    worst = max(errors, key=lambda name: errors[name])
    scales = sum(each.scales.nbytes for each in _products(model))
    return QuantizationReport(
        stored,
        len(errors),
        before,
        _bytes_of(model) + scales,
        sum(errors.values()) / len(errors),
        errors[worst],
        worst,
    )


def dense_bytes(model: GPTModel) -> int:
    """Return the most bytes that a product takes for a matrix that it converts."""
    return max((each.dense_bytes for each in _products(model)), default=0)


def _refuse_state(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise ConfigError(
        "weights that are stored in 8 bits can be neither saved nor exchanged",
        found="a model with --weight-quantization",
        fix="load it without, or start again with the other weights",
    )


def _is_quantized(name: str, weight: Tensor) -> bool:
    is_linear = name.endswith(".weight") and weight.dim() > 1
    return is_linear and not name.startswith("embedding.") and ".router." not in name


def _products(model: GPTModel) -> list[QuantizedProduct]:
    products = (product_in_use(weight) for weight in model.parameters())
    return [each for each in products if isinstance(each, QuantizedProduct)]


def _bytes_of(model: GPTModel) -> int:
    return sum(weight.nbytes for weight in model.parameters())


def _product_error(weight: Tensor, product: QuantizedProduct) -> float:
    """Return the relative error of the product of random rows, over all groups."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_ROWS, weight.shape[-1], generator=generator).to(weight)
    groups = weight.unsqueeze(0) if weight.dim() == 2 else weight
    wrong = norm = 0.0
    for group, matrix in enumerate(groups):
        exact = F.linear(rows.float(), matrix.float())
        wrong += float((product(rows, group=group).float() - exact).square().sum())
        norm += float(exact.square().sum())
    return (wrong / norm) ** 0.5 if norm > 0 else 0.0
