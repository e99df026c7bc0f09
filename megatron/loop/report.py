"""The reports of a run: step lines, a progress bar, throughput, MFU, memory; values for trackers.

A step has two lines: a short one to read, with the time, and that of Megatron-DeepSpeed, which
other people's scripts parse; tokens/s, MFU and memory follow at its end. The names of values, equal
in all trackers, are Megatron-DeepSpeed's TensorBoard tags. The last rank prints.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import add
from types import TracebackType
from typing import NamedTuple

from megatron import device, host, log
from megatron.config.runtime import LoggingConfig
from megatron.engine.base import EvaluationSum, StepPlan, StepReport
from megatron.model.specs import TokenFlops
from megatron.progress import Duration, Progress
from megatron.timers import Timers
from megatron.trackers.reporting import Trackers

# Peak dense half-precision TFLOP/s of one device, from the makers' data sheets.
PEAK_TFLOPS: Mapping[str, float] = {
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "A100": 312.0,
    "V100": 125.0,
    "L40S": 362.05,
    "A10G": 70.0,
}


class Speed(NamedTuple):
    """How fast a window of iterations was."""

    seconds_per_iteration: float
    samples_per_second: float
    tokens_per_second: float
    tflops_per_device: float  # model FLOPs, by the convention of megatron/model/accounting.py
    model_flops_utilisation: float | None  # share of the stated peak, None without one
    hardware_flops_utilisation: float | None  # with what is recomputed; None where nothing is


@dataclass(slots=True)
class _Window:
    """The totals since the last log line."""

    started: float = field(default_factory=lambda: time.perf_counter())
    iterations: int = 0
    samples: int = 0
    tokens: int = 0
    flops: float = 0.0
    hardware_flops: float = 0.0
    loss_totals: tuple[float, ...] = ()  # of each of the model's losses
    losses: int = 0
    skipped: int = 0
    nonfinite: int = 0

    def add(self, plan: StepPlan, report: StepReport, flops_per_token: TokenFlops) -> None:
        tokens = plan.global_batch_size * plan.seq_length
        self.iterations += 1
        self.samples += plan.global_batch_size
        self.tokens += tokens
        self.flops += tokens * flops_per_token.model
        self.hardware_flops += tokens * flops_per_token.hardware
        if math.isfinite(report.loss):
            before = self.loss_totals or (0.0,) * len(report.each_loss)
            self.loss_totals = tuple(map(add, before, report.each_loss))
            self.losses += 1
        else:
            self.nonfinite += 1
        self.skipped += report.skipped


class StepLog:
    """Reports iterations on the terminal at intervals, and to the trackers."""

    def __init__(
        self,
        config: LoggingConfig,
        duration: Duration,
        *,
        flops_per_token: Callable[[int], TokenFlops],
        world_size: int,
        with_length: bool = False,
        losses: tuple[str, ...] = ("lm loss",),
        timers: Timers | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        """Take over the `trackers` that are open on this rank, and close them at the end.

        Args:
            flops_per_token: FLOPs of one token's forward and backward pass, by the length of its
                sample.
            with_length: whether the length of samples is reported, since it changes.
            losses: the names of the model's losses.
        """
        self._losses = losses
        self._config, self._duration, self._with_length = config, duration, with_length
        self._flops_per_token, self._world_size = flops_per_token, world_size
        self._peak = config.peak_tflops or _peak_of(device.name())
        self._timers = timers or Timers()
        self._window = _Window()
        self._bar: log.ProgressBar | None = None  # from the first step on
        self._stopped = self._window.started
        self._trackers = trackers or Trackers()

    def __enter__(self) -> "StepLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        self._trackers.close()

    def restart_clock(self) -> None:
        """Restart the clock: earlier time (set-up, evaluation) does not count."""
        self._window.started = time.perf_counter()

    def resume_clock(self) -> None:
        """Exclude the time since the last `step` (evaluation, saving) from the window."""
        self._window.started += time.perf_counter() - self._stopped

    def has_line(self, progress: Progress) -> bool:
        """Return whether the step that led to `progress` has a line in the log."""
        return (
            progress.iteration % self._config.log_interval == 0
            or self._duration.is_done(progress)
            or progress.iteration == 1
        )

    def step(self, progress: Progress, plan: StepPlan, report: StepReport, **extra: float) -> None:
        """Count one iteration, report it if it is due, and stop the clock until `resume_clock`.

        Args:
            extra: further numbers for the line and the trackers, such as `params_norm`.
        """
        window = self._window
        window.add(plan, report, self._flops_per_token(plan.seq_length))
        if progress.iteration % self._config.tensorboard_log_interval == 0:
            self._record_step(progress, plan, report, extra)
        if self.has_line(progress):
            device.synchronize()
            speed = self._speed(time.perf_counter() - window.started)
            short = self._short_line(progress, plan, report, speed)
            log.last_rank(f"{short}\n{self._line(progress, plan, report, speed, extra)}")
            self._record_speed(progress, speed)
            self._window = _Window()
        if self._bar is None:
            before = progress.iteration - 1
            self._bar = log.ProgressBar(self._duration.total_iterations, before)
        self._bar.update(progress.iteration)
        self._stopped = time.perf_counter()

    def evaluation(self, name: str, result: EvaluationSum, progress: Progress) -> None:
        """Log and record one evaluation of the dataset `name` (validation or test)."""
        values = [
            f"{loss} value: {mean:.6E} | {loss} PPL: {_perplexity(mean):.6E} |"
            for loss, mean in zip(self._losses, result.means)
        ]
        values += [f"{metric}: {mean:.4f} |" for metric, mean in result.metrics]
        words = (
            f" {name} loss at iteration {progress.iteration} | {' '.join(values)} "
            f"tokens: {round(result.tokens)} |"
        )
        short = f"{name} after {progress.iteration} steps"
        means = [f"{loss} {mean:.4g}" for loss, mean in zip(self._losses, result.means)]
        means += [f"{metric} {mean:.4f}" for metric, mean in result.metrics]
        frame = "-" * len(words)
        log.last_rank("\n".join([" | ".join([short, *means]), frame, words, frame]))
        numbers: dict[str, float] = {}
        for loss, mean in zip(self._losses, result.means):
            tag = f"lm-loss-validation/{name}/{loss} validation"
            numbers[tag] = mean
            if self._config.log_validation_ppl_to_tensorboard:
                numbers[f"{tag} ppl"] = _perplexity(mean)
        numbers |= {f"{metric}-validation/{name}": mean for metric, mean in result.metrics}
        self._trackers.log_scalars(numbers, progress)

    def _speed(self, elapsed: float) -> Speed:
        window = self._window
        tflops = window.flops / elapsed / self._world_size / 1e12
        model = None if self._peak is None else tflops / self._peak
        recomputes = window.hardware_flops > window.flops
        return Speed(
            elapsed / window.iterations,
            window.samples / elapsed,
            window.tokens / elapsed,
            tflops,
            model,
            model * window.hardware_flops / window.flops if model and recomputes else None,
        )

    def _short_line(
        self, progress: Progress, plan: StepPlan, report: StepReport, speed: Speed
    ) -> str:
        """Return the main numbers, in at most 160 columns with the time in front.

        None of its words are those that scripts search for in the line that follows.
        """
        window, total = self._window, self._duration.total_iterations
        left = max(0, total - progress.iteration)
        minutes, seconds = divmod(round(left * speed.seconds_per_iteration), 60)
        means = [
            f"{name} {losses / window.losses:.4g}"
            for name, losses in zip(self._losses, window.loss_totals)
        ]
        parts = [
            f"step {progress.iteration}/{total}",
            *(means or ["no finite loss"]),
            f"lr {plan.learning_rate:.3g}",
            f"grad norm {report.grad_norm:.3g}",
            f"{speed.tokens_per_second:,.0f} tokens/s",
            f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} to go",
        ]
        return " | ".join(parts)

    def _line(
        self,
        progress: Progress,
        plan: StepPlan,
        report: StepReport,
        speed: Speed,
        extra: Mapping[str, float],
    ) -> str:
        window = self._window
        parts = [
            f"iteration {progress.iteration:8d}/{self._duration.total_iterations:8d}",
            f"consumed samples: {progress.consumed_samples:12d}",
            f"consumed tokens: {progress.consumed_tokens:12d}",
            f"elapsed time per iteration (s): {speed.seconds_per_iteration:.2f}",
            f"learning rate: {plan.learning_rate:.3E}",
            f"global batch size: {plan.global_batch_size:5d}",
        ]
        if window.losses:
            parts += [
                f"{name}: {total / window.losses:.6E}"
                for name, total in zip(self._losses, window.loss_totals)
            ]
        parts += [f"loss scale: {report.loss_scale:.1f}", f"grad norm: {report.grad_norm:.3f}"]
        if report.num_zeros is not None:
            parts.append(f"num zeros: {report.num_zeros:.1f}")
        if report.load_balancing_loss is not None:
            parts.append(f"load_balancing_loss: {report.load_balancing_loss:.6E}")
        if report.most_loaded_expert is not None:
            parts.append(f"most loaded expert: {report.most_loaded_expert:.2f}")
        if report.idle_experts is not None:
            parts.append(f"idle experts: {report.idle_experts}")
        if report.dropped_tokens is not None:
            parts.append(f"dropped tokens: {report.dropped_tokens:.2%}")
        if report.z_loss is not None:
            parts.append(f"z_loss: {report.z_loss:.6E}")
        parts += [f"{name.replace('_', ' ')}: {value:.3f}" for name, value in extra.items()]
        if self._with_length:
            parts.append(f"curriculum seqlen: {plan.seq_length:5d}")
        parts += [
            f"number of skipped iterations: {window.skipped:3d}",
            f"number of nan iterations: {window.nonfinite:3d}",
            f"samples per second: {speed.samples_per_second:.3f}",
            f"TFLOPs: {speed.tflops_per_device:.2f}",
            f"tokens per second: {speed.tokens_per_second:.0f}",
        ]
        if speed.model_flops_utilisation is not None:
            parts.append(f"MFU: {100 * speed.model_flops_utilisation:.1f}%")
        if speed.hardware_flops_utilisation is not None:
            parts.append(f"HFU: {100 * speed.hardware_flops_utilisation:.1f}%")
        parts.append(f"memory (GiB): {device.peak_memory_bytes() / 2**30:.2f}")
        return " " + " | ".join(parts) + " |"

    def _record_step(
        self, progress: Progress, plan: StepPlan, report: StepReport, extra: Mapping[str, float]
    ) -> None:
        config = self._config
        numbers: dict[str, float] = {
            "steps-vs-samples/y=samples,x=steps": progress.consumed_samples,
            "steps-vs-tokens/y=tokens,x=steps": progress.consumed_tokens,
            "grad-norm/grad-norm": report.grad_norm,
        }
        if self._with_length:
            numbers["curriculum_seqlen"] = plan.seq_length
        if config.log_learning_rate_to_tensorboard:
            numbers["learning-rate/learning-rate"] = plan.learning_rate
        if config.log_batch_size_to_tensorboard:
            numbers["batch-size/batch-size"] = plan.global_batch_size
        if math.isfinite(report.loss):
            for name, mean in zip(self._losses, report.each_loss):
                numbers[f"lm-loss-training/{name}"] = mean
        if config.log_loss_scale_to_tensorboard:
            numbers["loss-scale/loss-scale"] = report.loss_scale
        if report.num_zeros is not None:
            numbers["num-zeros/num-zeros"] = report.num_zeros
        if report.load_balancing_loss is not None:
            numbers["load-balancing-loss/load-balancing-loss"] = report.load_balancing_loss
        if report.most_loaded_expert is not None:
            numbers["expert-load/most-loaded"] = report.most_loaded_expert
        if report.idle_experts is not None:
            numbers["expert-load/idle"] = report.idle_experts
        if report.dropped_tokens is not None:
            numbers["expert-load/dropped"] = report.dropped_tokens
        if report.z_loss is not None:
            numbers["z-loss/z-loss"] = report.z_loss
        for name, value in extra.items():
            tag = name.replace("_", "-")
            numbers[f"{tag}/{tag}"] = value
        if config.log_memory_to_tensorboard:
            numbers["memory/allocated-bytes"] = device.memory_allocated_bytes()
            numbers["memory/peak-bytes"] = device.peak_memory_bytes()
            workers = host.peak_resident_bytes(with_children=True)
            numbers["memory/peak-host-bytes-with-workers"] = workers
        self._trackers.log_scalars(numbers, progress)

    def _record_speed(self, progress: Progress, speed: Speed) -> None:
        numbers: dict[str, float] = {}
        if self._config.log_timers_to_tensorboard:
            numbers["iteration-time/iteration-time"] = speed.seconds_per_iteration
            for name, seconds in self._timers.elapsed().items():  # of the whole window
                numbers[f"time/{name}-time"] = seconds
        numbers["iteration-time/samples per second"] = speed.samples_per_second
        numbers["iteration-time/tokens per second"] = speed.tokens_per_second
        numbers["iteration-time/TFLOPs per gpu (estimated)"] = speed.tflops_per_device
        if speed.model_flops_utilisation is not None:
            numbers["iteration-time/MFU"] = speed.model_flops_utilisation
        if speed.hardware_flops_utilisation is not None:
            numbers["iteration-time/HFU"] = speed.hardware_flops_utilisation
        if self._config.log_world_size_to_tensorboard:
            numbers["iteration-time/world_size"] = self._world_size
        self._trackers.log_scalars(numbers, progress)


def _peak_of(device_name: str) -> float | None:
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


def _perplexity(mean: float) -> float:
    return math.exp(min(20.0, mean))
