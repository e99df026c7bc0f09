"""Tests of megatron.timers."""

import pytest

from megatron import device
from megatron.timers import Timers
from tests.conftest import Clock


def test_a_timer_adds_up_its_stretches(clock: Clock) -> None:
    timers = Timers()
    for seconds in (2.0, 3.0):
        timers("forward").start()
        clock.now += seconds
        timers("forward").stop()
        clock.now += 50
    assert timers("forward").count == 2
    assert timers("forward").elapsed(reset=False) == 5.0
    assert timers("forward").elapsed() == 5.0
    assert timers("forward").elapsed() == 0.0
    assert timers("forward").count == 0


def test_a_timer_measures_a_block_even_if_it_fails(clock: Clock) -> None:
    timers = Timers()

    def fail() -> None:
        with timers("backward"):
            clock.now += 4
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with timers("forward"):
        clock.now += 1
    assert timers.elapsed() == {"backward": 4.0, "forward": 1.0}
    assert timers.elapsed() == {"backward": 0.0, "forward": 0.0}


def test_a_running_timer_can_be_read_and_goes_on_from_there(clock: Clock) -> None:
    timers = Timers()
    timers("interval").start()
    clock.now += 3
    assert timers("interval").elapsed(reset=False) == 3.0
    assert timers("interval").elapsed() == 3.0
    clock.now += 2
    timers("interval").stop()
    assert timers("interval").elapsed() == 2.0


def test_starting_twice_and_stopping_without_start_are_errors() -> None:
    timer = Timers()("step")
    with pytest.raises(RuntimeError, match="'step' was stopped but is not running"):
        timer.stop()
    timer.start()
    with pytest.raises(RuntimeError, match="'step' was started twice"):
        timer.start()


@pytest.mark.parametrize("synchronize", [False, True])
def test_the_device_is_waited_for_only_when_asked(
    synchronize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(device, "synchronize", lambda: calls.append(None))
    with Timers(synchronize=synchronize)("forward"):
        pass
    assert len(calls) == (2 if synchronize else 0)
