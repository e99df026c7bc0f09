"""The factor that lifts fp16 gradients out of underflow, and how it follows overflows.

The loss is multiplied by `scale` before backward and the gradients divided by it after. A scaler
only counts; who found the overflow has to have agreed on it over all ranks, or the scales part.
"""

from collections.abc import Mapping
from typing import Protocol

from megatron.config.precision import Precision, PrecisionConfig
from megatron.errors import CheckpointError, NumericsError

GROWTH = 2.0
BACKOFF = 0.5


class GradScaler(Protocol):
    """The interface of a loss scale."""

    @property
    def scale(self) -> float:
        """The factor on the loss of the next iteration."""

    @property
    def expects_overflow(self) -> bool:
        """Whether occasional overflows are part of the schedule."""

    def update(self, *, overflow: bool) -> None:
        """Record the outcome of one iteration."""

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

    def update(self, *, overflow: bool) -> None:
        """Do nothing: it is constant."""

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
        self._scale = initial_scale
        self._min_scale = min_scale
        self._growth_interval = growth_interval
        self._hysteresis = hysteresis
        self._good_iterations = 0
        self._overflows_left = hysteresis

    @property
    def scale(self) -> float:
        """The factor on the loss of the next iteration."""
        return self._scale

    def update(self, *, overflow: bool) -> None:
        """Record the outcome of one iteration; NumericsError below the smallest scale."""
        if not overflow:
            self._good_iterations += 1
            if self._good_iterations == self._growth_interval:
                self._move(self._scale * GROWTH)
            return
        self._good_iterations = 0
        self._overflows_left -= 1
        if self._overflows_left > 0:
            return
        if self._scale * BACKOFF < self._min_scale:
            raise NumericsError(
                "the gradients overflow although the loss scale is at its minimum",
                found=f"loss scale {self._scale:g}, --min-loss-scale {self._min_scale:g}",
                fix="use --bf16, or a lower --lr; the run resumes from its last checkpoint",
            )
        self._move(self._scale * BACKOFF)

    def state_dict(self) -> dict[str, float]:
        """Return the state as JSON values."""
        return {
            "scale": self._scale,
            "good_iterations": self._good_iterations,
            "overflows_left": self._overflows_left,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state from `state_dict`; that of another kind is an error."""
        if set(state) != set(self.state_dict()):
            raise CheckpointError(
                "the checkpoint holds no state of a dynamic loss scale",
                found=f"fields: {', '.join(sorted(state)) or 'none'}",
                fix="start with the --fp16 and --loss-scale flags of the run that saved it, or "
                "use --no-load-optim",
            )
        self._scale = float(state["scale"])
        self._good_iterations = int(state["good_iterations"])
        self._overflows_left = int(state["overflows_left"])

    def _move(self, scale: float) -> None:
        self._scale = scale
        self._good_iterations = 0
        self._overflows_left = self._hysteresis


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
