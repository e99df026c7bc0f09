"""PrecisionConfig: the dtypes of the arithmetic, and how fp16 avoids underflow."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from megatron.config.fields import check_field, flag, raise_all
from megatron.errors import ConfigError


class Precision(StrEnum):
    """Dtype of parameters and activations; the value is torch's name for it."""

    FP64 = "float64"
    FP32 = "float32"
    BF16 = "bfloat16"
    FP16 = "float16"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        bits = {Precision.FP64: 64, Precision.FP32: 32, Precision.BF16: 16, Precision.FP16: 16}
        return bits[self] // 8

    @property
    def is_half(self) -> bool:
        """Whether fp32 master weights are kept beside the model."""
        return self in (Precision.BF16, Precision.FP16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """Precision of the arithmetic; fp32 unless one of the switches is given."""

    fp16: bool = flag(False, help="float16 with fp32 master weights and loss scaling")
    bf16: bool = flag(False, help="bfloat16 with fp32 master weights")
    fp64: bool = flag(False, help="float64, for proofs that two layouts agree")
    loss_scale: float | None = flag(
        None, help="constant loss scale for fp16; when not set it is dynamic"
    )
    initial_loss_scale: float = flag(2.0**32, help="first dynamic loss scale")
    min_loss_scale: float = flag(1.0, help="dynamic loss scale below which the run stops")
    loss_scale_window: int = flag(1000, help="good iterations before the loss scale doubles")
    hysteresis: int = flag(
        2,
        help="overflows, since the loss scale last changed, before it halves",
    )
    fp32_residual_connection: bool = flag(
        False, help="keep the residual stream in fp32 in a half-precision model"
    )
    accumulate_allreduce_grads_in_fp32: bool = flag(
        True,
        help="accumulate and reduce half-precision gradients in fp32",
        off=("--grad-reduce-in-bf16",),
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
        chosen = [f"--{name}" for name in ("fp16", "bf16", "fp64") if getattr(self, name)]
        if len(chosen) > 1:
            yield ConfigError(
                "more than one precision was asked for",
                found=" ".join(chosen),
                fix="keep one of them, or none for float32",
            )
        if self.fp32_residual_connection and not self.precision.is_half:
            yield ConfigError(
                "an fp32 residual stream needs a half-precision model",
                found="--fp32-residual-connection without --fp16 or --bf16",
                fix="drop it, or add --bf16",
            )
        for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
            value = getattr(self, name)
            yield from check_field(
                value > 0,
                name,
                value,
                problem="loss scaling needs it positive",
                fix="use 1 or more",
            )
        if self.loss_scale is not None:
            yield from check_field(
                self.loss_scale > 0,
                "loss_scale",
                self.loss_scale,
                problem="the loss scale is not positive",
                fix="use a power of two such as 4096, or drop it for dynamic scaling",
            )

    @property
    def precision(self) -> Precision:
        """Dtype of parameters and activations."""
        if self.fp16:
            return Precision.FP16
        if self.bf16:
            return Precision.BF16
        return Precision.FP64 if self.fp64 else Precision.FP32

    @property
    def gradient_precision(self) -> Precision:
        """Dtype in which gradients are accumulated and reduced."""
        wide = self.precision.is_half and self.accumulate_allreduce_grads_in_fp32
        return Precision.FP32 if wide else self.precision

    @property
    def splits_masters(self) -> bool:
        """Whether Adam keeps of the fp32 weights what the model's bfloat16 ones lack.

        They are put together in the memory of gradients, which have to be as wide.
        """
        return self.precision is Precision.BF16 and self.gradient_precision is Precision.FP32
