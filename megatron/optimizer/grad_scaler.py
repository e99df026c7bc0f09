"""The factor that lifts fp16 gradients out of underflow, and how it follows overflows.

The loss is multiplied by `scale` before backward and the gradients divided by it after. A scaler
only counts; who found the overflow has to have agreed on it over all ranks, or the scales part. A
scale that changes is kept on the device: the next step needs it before the host knows the outcome
of this one.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from megatron import device
from megatron.config.precision import Precision, PrecisionConfig
from megatron.errors import CheckpointError, NumericsError

GROWTH = 2.0
BACKOFF = 0.5


class GradScaler(Protocol):
    """The interface of a loss scale."""

    @property
    def scale(self) -> Tensor | float:
        """The factor on the loss of the next iteration: a float64 scalar if it may change."""

    @property
    def expects_overflow(self) -> bool:
        """Whether occasional overflows are part of the schedule."""

    def update(self, overflow: Tensor) -> Tensor:
        """Record the outcome of one iteration; return whether the scale is too small to go on."""

    def check(self, *, too_small: bool, scale: float) -> None:
        """Raise NumericsError if `update` returned true in an iteration at `scale`."""

    def state_dict(self) -> dict[str, float]:
        """Return the state as JSON values."""

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state from `state_dict`."""


class ConstantGradScaler:
    """A constant loss scale; 1 for every precision that needs none."""

    expects_overflow = False

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale

    @property
    def scale(self) -> float:
        """The factor on the loss."""
        return self._scale

    def update(self, overflow: Tensor) -> Tensor:
        """Do nothing: it is constant."""
        return torch.zeros_like(overflow)

    def check(self, *, too_small: bool, scale: float) -> None:
        """Do nothing: no constant scale is too small."""

    def state_dict(self) -> dict[str, float]:
        """Return nothing: the flag determines the scale."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Do nothing: a constant scale follows the flag, not the checkpoint."""


class DynamicGradScaler:
    """Halves the loss scale after `hysteresis` overflows, doubles it after a window without one.

    The count of overflows starts anew after every halving and every doubling. (Megatron refills it
    only at a doubling, so that after the first halving every single overflow halves again.)
    """

    expects_overflow = True

    def __init__(
        self, *, initial_scale: float, min_scale: float, growth_interval: int, hysteresis: int
    ) -> None:
        self._min_scale = min_scale
        self._growth_interval = growth_interval
        self._hysteresis = hysteresis
        self._scale = _on_device(initial_scale)
        self._good_iterations = _on_device(0)
        self._overflows_left = _on_device(hysteresis)

    @property
    def scale(self) -> Tensor:
        """The factor on the loss of the next iteration: a float64 scalar on the device."""
        return self._scale

    def update(self, overflow: Tensor) -> Tensor:
        """Record the outcome of one iteration; return whether the scale is at its minimum."""
        good = torch.where(overflow, 0.0, self._good_iterations + 1)
        left = torch.where(overflow, self._overflows_left - 1, self._overflows_left)
        grows = good == self._growth_interval
        used_up = overflow & (left <= 0)
        too_small = used_up & (self._scale * BACKOFF < self._min_scale)
        shrinks = used_up & ~too_small
        moves = grows | shrinks
        scale = torch.where(grows, self._scale * GROWTH, self._scale)
        self._scale = torch.where(shrinks, self._scale * BACKOFF, scale)
        self._good_iterations = torch.where(moves, 0.0, good)
        self._overflows_left = torch.where(moves, self._hysteresis, left)
        return too_small

    def check(self, *, too_small: bool, scale: float) -> None:
        """Raise NumericsError if `update` returned true in an iteration at `scale`."""
        if too_small:
            raise NumericsError(
                "the gradients overflow although the loss scale is at its minimum",
                found=f"loss scale {scale:g}, --min-loss-scale {self._min_scale:g}",
                fix="use --bf16, or a lower --lr; the run resumes from its last checkpoint",
            )

    def state_dict(self) -> dict[str, float]:
        """Return the state as JSON values."""
        return {
            "scale": float(self._scale),
            "good_iterations": int(self._good_iterations),
            "overflows_left": int(self._overflows_left),
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state from `state_dict`; that of another kind is an error."""
        if set(state) != {"scale", "good_iterations", "overflows_left"}:
            raise CheckpointError(
                "the checkpoint holds no state of a dynamic loss scale",
                found=f"fields: {', '.join(sorted(state)) or 'none'}",
                fix="start with the --fp16 and --loss-scale flags of the run that saved it, or "
                "use --no-load-optim",
            )
        self._scale = _on_device(state["scale"])
        self._good_iterations = _on_device(state["good_iterations"])
        self._overflows_left = _on_device(state["overflows_left"])


def build_scaler(precision: PrecisionConfig) -> GradScaler:
    """Return the loss scale that the flags ask for: 1 unless the model is in fp16."""
    if precision.precision is not Precision.FP16 or precision.loss_scale is not None:
        return ConstantGradScaler(precision.loss_scale or 1.0)
    return DynamicGradScaler(
        initial_scale=precision.initial_loss_scale,
        min_scale=precision.min_loss_scale,
        growth_interval=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
    )


def _on_device(value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float64, device=device.current())
