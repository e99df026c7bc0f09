"""What in a run's numbers is not to be believed: a loss or gradient that is not finite.

The policy is the user's: stop at once, or skip the update up to a number of times in a row. An
fp16 overflow is not an anomaly; the loss scaler deals with it.
"""

import math
from collections.abc import Callable

from megatron import log
from megatron.config.training import NonfinitePolicy, TrainingConfig
from megatron.engine.base import StepReport
from megatron.errors import NumericsError
from megatron.progress import Progress


def check_numbers(
    report: StepReport,
    progress: Progress,
    config: TrainingConfig,
    origin: Callable[[], str | None],
) -> None:
    """Raise if the step that led to `progress` went wrong in a way the policy does not allow.

    Args:
        origin: finds where the first number that is not finite appears; None: nobody can say.

    Raises:
        NumericsError: on every rank alike, since a `StepReport` is the same on all of them.
    """
    if math.isfinite(report.loss) and (report.overflow or math.isfinite(report.grad_norm)):
        return
    found = (
        f"loss {report.loss}, gradient norm {report.grad_norm} at iteration {progress.iteration}"
    )
    stop = config.nonfinite_policy is NonfinitePolicy.STOP
    too_many = progress.nonfinite_in_a_row > config.nonfinite_limit
    if stop or too_many or progress.nonfinite_in_a_row == 1:
        place = origin()
        found += f"; first found {place}" if place else ""
        if not stop and not too_many:
            log.warning(f"a step that is not finite is skipped: {found}")
    if stop and math.isfinite(report.loss) and report.loss_scale != 1:
        raise NumericsError(
            "the gradients overflow under the constant loss scale",
            found=f"--loss-scale {report.loss_scale:g}; {found}",
            fix="use a lower --loss-scale, or drop it for dynamic scaling",
        )
    if stop:
        raise NumericsError(
            "the loss or the gradient is not finite",
            found=found,
            fix="resume from the last checkpoint with a lower --lr or a longer warm-up, look at "
            "the data of this iteration, or allow some with --nonfinite-policy skip",
        )
    if too_many:
        raise NumericsError(
            "too many iterations in a row were not finite",
            found=f"{progress.nonfinite_in_a_row} in a row, --nonfinite-limit "
            f"{config.nonfinite_limit}; {found}",
            fix="resume from an older checkpoint with a lower --lr",
        )
