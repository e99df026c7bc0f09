"""Tests of megatron.scheduling.control.timing."""

import dataclasses

import pytest

from megatron.errors import ConfigError
from megatron.scheduling.control.states import TransitionKind
from megatron.scheduling.control.timing import ControlTiming

TIMING = ControlTiming()


def test_a_pause_has_its_own_time_and_a_client_may_give_another() -> None:
    assert TIMING.preparation_ns(TransitionKind.PAUSE, 0) == 10_000_000_000
    assert TIMING.preparation_ns(TransitionKind.SUSPEND, 0) == 60_000_000_000
    assert TIMING.preparation_ns(TransitionKind.SUSPEND, 5) == 5_000_000


@pytest.mark.parametrize("value", [0, 1.5, True])
def test_a_time_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="pause_ns of the control plane is not a number"):
        dataclasses.replace(TIMING, pause_ns=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"lease_ns": TIMING.fence_ns}, {"fence_ns": 1}])
def test_a_rank_fences_itself_before_it_is_removed(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="a rank would be removed before it knows"):
        dataclasses.replace(TIMING, **changes)
