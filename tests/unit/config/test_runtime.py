"""What is reported and where a run stands: what is refused."""

import pytest

from megatron.config.runtime import Backend, DeviceKind, LaunchConfig, LoggingConfig, LogLevel
from megatron.errors import ConfigError


@pytest.mark.parametrize(
    "name", ["log_interval", "tensorboard_log_interval", "tensorboard_queue_size", "peak_tflops"]
)
def test_intervals_and_sizes_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match="it is not positive") as caught:
        LoggingConfig(**{name: 0})
    assert caught.value.found == f"--{name.replace('_', '-')} 0"


def test_replicas_are_quieter_than_rank_zero() -> None:
    levels = list(LogLevel)
    config = LoggingConfig()
    assert levels.index(config.log_level) < levels.index(config.log_level_replica)


def test_a_timeout_is_positive() -> None:
    with pytest.raises(ConfigError, match="a timeout is not positive"):
        LaunchConfig(distributed_timeout_minutes=0)


def test_nccl_does_not_carry_cpu_tensors() -> None:
    with pytest.raises(ConfigError, match="nccl carries only CUDA tensors") as caught:
        LaunchConfig(device=DeviceKind.CPU, distributed_backend=Backend.NCCL)
    assert "gloo" in caught.value.fix
