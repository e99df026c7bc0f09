"""LoggingConfig and LaunchConfig: what is reported, and the devices of the run."""

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
    log_loss_scale_to_tensorboard: bool = flag(True, help="write the loss scale")
    log_batch_size_to_tensorboard: bool = flag(False, help="write the global batch size")
    log_validation_ppl_to_tensorboard: bool = flag(False, help="write validation perplexity")
    log_timers_to_tensorboard: bool = flag(False, help="write iteration times")
    log_memory_to_tensorboard: bool = flag(False, help="write memory in use")
    log_world_size_to_tensorboard: bool = flag(False, help="write the number of ranks")
    log_params_norm: bool = flag(False, help="compute and log the L2 norm of the parameters")
    log_num_zeros_in_grad: bool = flag(False, help="count and log zeros in the gradient")
    peak_tflops: float | None = flag(
        None,
        help="stated peak of one device in TFLOP/s for the MFU; when not set taken from a table of "
        "GPUs, and on others no MFU is printed",
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
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
        if self.device is DeviceKind.CPU and self.distributed_backend is Backend.NCCL:
            yield ConfigError(
                "nccl carries only CUDA tensors",
                found="--device cpu --distributed-backend nccl",
                fix="use --distributed-backend gloo, or drop it: the backend follows the device",
            )
