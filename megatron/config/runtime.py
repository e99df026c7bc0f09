"""LoggingConfig and LaunchConfig: what is reported, and the devices of the run."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from megatron.config.fields import check_field, flag, raise_all
from megatron.errors import ConfigError


class LogLevel(StrEnum):
    """The lowest level of log messages that a rank prints."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class DeviceKind(StrEnum):
    """The kind of device of tensors."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Backend(StrEnum):
    """Library that carries collectives."""

    NCCL = "nccl"
    GLOO = "gloo"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """What is reported, where and how often."""

    log_interval: int = flag(100, help="iterations between log lines")
    log_level: LogLevel = flag(LogLevel.INFO, help="lowest level of messages that rank 0 prints")
    log_level_replica: LogLevel = flag(
        LogLevel.ERROR, help="lowest level of messages that the other ranks print"
    )
    tensorboard_dir: str | None = flag(None, help="folder for TensorBoard events")
    tensorboard_log_interval: int = flag(1, help="iterations between TensorBoard points")
    tensorboard_queue_size: int = flag(1000, help="events held before they are written")
    log_learning_rate_to_tensorboard: bool = flag(
        True, help="write the learning rate", off=("--no-log-learnig-rate-to-tensorboard",)
    )
    log_loss_scale_to_tensorboard: bool = flag(
        True, help="write the loss scale", off=("--disable-log-loss-scale-to-tensorboard",)
    )
    log_batch_size_to_tensorboard: bool = flag(False, help="write the global batch size")
    log_validation_ppl_to_tensorboard: bool = flag(False, help="write validation perplexity")
    log_timers_to_tensorboard: bool = flag(False, help="write iteration times")
    log_memory_to_tensorboard: bool = flag(False, help="write memory in use")
    log_world_size_to_tensorboard: bool = flag(False, help="write the number of ranks")
    log_params_norm: bool = flag(False, help="compute and log the L2 norm of the parameters")
    log_num_zeros_in_grad: bool = flag(False, help="count and log zeros in the gradient")
    straggler_report_interval: int = flag(
        0,
        help="iterations between lines that name the rank that computes longest and the one that "
        "waits longest for data; 0 for never",
    )
    peak_tflops: float | None = flag(
        None,
        help="stated peak of one device in TFLOP/s for the MFU; when not set taken from a table of "
        "GPUs, and on others no MFU is printed",
    )

    profile: bool = flag(
        False,
        help="record some steps with torch.profiler: a trace of each rank of --profile-ranks, and "
        "lines that say how much communication ran beside computation",
        values={"pt": "true", "pt-full": "true"},
    )
    profile_step_start: int = flag(
        10, help="iterations that are done when the profile begins, those of a resumed run included"
    )
    profile_step_end: int = flag(12, help="iterations that are done when the profile ends")
    profile_ranks: tuple[int, ...] = flag((0,), help="ranks that --profile records")
    profile_dir: str | None = flag(
        None, help="folder for the traces; when not set that of --tensorboard-dir"
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    @property
    def profile_folder(self) -> str:
        """The folder of --profile's traces."""
        folder = self.profile_dir or self.tensorboard_dir
        assert folder is not None, "refused"  # noqa: S101  # invariant: `_profile_problems`
        return folder

    def _problems(self) -> Iterator[ConfigError]:
        yield from self._profile_problems()
        name, value = "straggler_report_interval", self.straggler_report_interval
        yield from check_field(
            value >= 0, name, value, problem="it cannot be negative", fix="use 0 for never"
        )
        for name in (
            "log_interval",
            "tensorboard_log_interval",
            "tensorboard_queue_size",
            "peak_tflops",
        ):
            value = getattr(self, name)
            if value is not None:
                yield from check_field(
                    value > 0, name, value, problem="it is not positive", fix="use 1 or more"
                )

    def _profile_problems(self) -> Iterator[ConfigError]:
        start, end = self.profile_step_start, self.profile_step_end
        if not 0 <= start < end:
            yield ConfigError(
                "no step is between the beginning and the end of the profile",
                found=f"--profile-step-start {start} --profile-step-end {end}",
                fix=f"use --profile-step-start {max(start, 0)} "
                f"--profile-step-end {max(start, 0) + 2}",
            )
        if not self.profile_ranks or min(self.profile_ranks) < 0:
            yield ConfigError(
                "the profile is of no rank",
                found=f"--profile-ranks {' '.join(map(str, self.profile_ranks))}",
                fix="use --profile-ranks 0",
            )
        if self.profile and self.profile_dir is None and self.tensorboard_dir is None:
            yield ConfigError(
                "a profile is asked for, and there is no folder for it",
                found="--profile without --profile-dir or --tensorboard-dir",
                fix="add --profile-dir FOLDER",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """The devices of a run, and the communication of its ranks."""

    device: DeviceKind = flag(DeviceKind.AUTO, help="auto is cuda where there is one")
    distributed_backend: Backend | None = flag(
        None, help="when not set nccl on cuda and gloo on cpu"
    )
    distributed_timeout_minutes: float = flag(
        10.0, help="minutes after which a collective that waits for a rank fails"
    )
    stall_timeout: float = flag(
        4.0,
        help="seconds without a sign of life, or without progress in a step, after which a rank is "
        "named, with the stacks of all; five steps where they take longer; 0 for never",
    )
    stall_exit_timeout: float | None = flag(
        None,
        help="seconds after which such a rank ends the run, which may be started again; when not "
        "set 8 without a sign of life, and --distributed-timeout-minutes without progress; 0 for "
        "never",
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
        yield from check_field(
            self.distributed_timeout_minutes > 0,
            "distributed_timeout_minutes",
            self.distributed_timeout_minutes,
            problem="a timeout is not positive",
            fix="use 10",
        )
        yield from self._stall_problems()
        if self.device is DeviceKind.CPU and self.distributed_backend is Backend.NCCL:
            yield ConfigError(
                "nccl carries only CUDA tensors",
                found="--device cpu --distributed-backend nccl",
                fix="use --distributed-backend gloo, or drop it: the backend follows the device",
            )

    def _stall_problems(self) -> Iterator[ConfigError]:
        for name in ("stall_timeout", "stall_exit_timeout"):
            value = getattr(self, name)
            if value is not None:
                yield from check_field(
                    math.isfinite(value) and value >= 0,
                    name,
                    value,
                    problem="a number of seconds is negative or not finite",
                    fix="use 0 for never",
                )
        end = self.stall_exit_timeout
        if end and self.stall_timeout > end:
            yield ConfigError(
                "a run would end before the rank that has stopped is named",
                found=f"--stall-timeout {self.stall_timeout:g} --stall-exit-timeout {end:g}",
                fix=f"use --stall-exit-timeout {2 * self.stall_timeout:g}",
            )
