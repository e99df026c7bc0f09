"""What is reported and where a run stands: what is refused."""

from typing import Any

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


@pytest.mark.parametrize(
    ("flags", "problem", "fix"),
    [
        (
            {"profile_step_start": 12},
            "no step is between the beginning and the end of the profile",
            "use --profile-step-start 12 --profile-step-end 14",
        ),
        (
            {"profile_step_start": -1},
            "no step is between",
            "use --profile-step-start 0 --profile-step-end 2",
        ),
        ({"profile_ranks": ()}, "the profile is of no rank", "use --profile-ranks 0"),
        ({"profile_ranks": (0, -1)}, "the profile is of no rank", "use --profile-ranks 0"),
        ({"profile": True}, "there is no folder for it", "add --profile-dir FOLDER"),
    ],
)
def test_a_profile_has_steps_ranks_and_a_folder(
    flags: dict[str, Any], problem: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        LoggingConfig(**flags)
    assert caught.value.fix == fix


def test_traces_lie_beside_the_events_of_tensorboard_unless_told_otherwise() -> None:
    beside = LoggingConfig(profile=True, tensorboard_dir="events")
    assert beside.profile_folder == "events"
    assert LoggingConfig(tensorboard_dir="events", profile_dir="traces").profile_folder == "traces"


def test_replicas_are_quieter_than_rank_zero() -> None:
    levels = list(LogLevel)
    config = LoggingConfig()
    assert levels.index(config.log_level) < levels.index(config.log_level_replica)


def test_an_interval_of_straggler_reports_may_be_zero_and_not_less() -> None:
    assert LoggingConfig(straggler_report_interval=0).straggler_report_interval == 0
    with pytest.raises(ConfigError, match="it cannot be negative"):
        LoggingConfig(straggler_report_interval=-1)


def test_a_timeout_is_positive() -> None:
    with pytest.raises(ConfigError, match="a timeout is not positive"):
        LaunchConfig(distributed_timeout_minutes=0)


def test_nccl_does_not_carry_cpu_tensors() -> None:
    with pytest.raises(ConfigError, match="nccl carries only CUDA tensors") as caught:
        LaunchConfig(device=DeviceKind.CPU, distributed_backend=Backend.NCCL)
    assert "gloo" in caught.value.fix


@pytest.mark.parametrize("name", ["stall_timeout", "stall_exit_timeout"])
@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_stalls_are_found_after_a_number_of_seconds(name: str, seconds: float) -> None:
    with pytest.raises(ConfigError, match="a number of seconds is negative or not finite"):
        LaunchConfig(**{name: seconds})


def test_a_rank_that_has_stopped_is_named_before_the_run_ends() -> None:
    with pytest.raises(ConfigError, match="before the rank that has stopped is named") as caught:
        LaunchConfig(stall_timeout=10, stall_exit_timeout=5)
    assert caught.value.fix == "use --stall-exit-timeout 20"
    LaunchConfig(stall_timeout=10, stall_exit_timeout=0)  # never
