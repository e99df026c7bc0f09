"""Writes the numbers of a step to DeepSpeed's monitors (CSV files, Weights & Biases, Comet).

DeepSpeed itself writes learning rate and loss scale. The loss that it has is scaled for the
backward pass, and of one replica, so the true one comes from here. TensorBoard needs none of this:
it is written by the loop.
"""

from megatron.engine.base import StepReport
from megatron.engine.deepspeed.interface import DeepSpeedRuntime


def write_monitors(runtime: DeepSpeedRuntime, report: StepReport) -> None:
    """Write loss and gradient norm of a step to the monitors enabled in DeepSpeed.

    Points are at samples consumed, as DeepSpeed's own. The same call on every rank; one writes.
    """
    if not runtime.monitor.enabled:
        return
    at = runtime.global_samples
    runtime.monitor.write_events(
        [
            ("Train/Samples/train_loss", report.loss, at),
            ("Train/Samples/grad_norm", report.grad_norm, at),
        ]
    )
