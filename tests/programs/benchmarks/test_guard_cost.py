"""The benchmark of guards: what is measured of a rank, and shares of turns."""

import json
import threading
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import pytest

from benchmarks.reliability import guard_cost, guard_worker
from benchmarks.reliability.guard_worker import COMPARISONS, NOTES, THREADS, WARM_UP, Tally
from megatron.errors import MachineError
from megatron.loop.hooks import AgreeOnState
from megatron.peers.activity import DATA, Activity


class Clock:
    """Takes two seconds to be read, and goes on when work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 2.0
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


def test_what_reading_the_clock_takes_is_subtracted() -> None:
    clock = Clock()
    tally = Tally(clock)
    tally.measure("a", lambda: clock.work(5.0))
    assert tally.seconds == {"a": 5.0}


def test_a_call_within_a_measured_one_counts_once() -> None:
    clock = Clock()
    tally = Tally(clock)
    inner = tally.measured("inner", clock.work)
    tally.measure("outer", lambda: inner(5.0))
    assert tally.seconds == {"outer": 5.0}


def test_of_a_block_its_beginning_and_its_end_are_measured() -> None:
    clock = Clock()
    tally = Tally(clock)

    errors: list[object] = []

    class Block:
        def __enter__(self) -> None:
            clock.work(3.0)

        def __exit__(self, *error: object) -> None:
            errors.append(error[0])
            clock.work(4.0)

    block = tally.measured_block("a", Block)
    with block():
        clock.work(100.0)
    with pytest.raises(ZeroDivisionError), block():
        raise ZeroDivisionError
    assert tally.seconds == {"a": 14.0}
    assert errors == [None, ZeroDivisionError]


def test_guards_are_measured_from_the_warm_up_to_the_last_step() -> None:
    found: list[Mapping[str, float]] = []
    agree, step = AgreeOnState.__call__, Activity.step
    ends = threading.Event()
    watch = threading.Thread(target=ends.wait, name=THREADS[0], daemon=True)
    watch.start()
    with guard_worker.measured_guards(found.append):
        activity = Activity()
        for iteration in range(1, WARM_UP + 3):
            activity.step(iteration)
            with activity.during(DATA), activity.waiting():
                sum(range(100_000))
            AgreeOnState(None, None, 0)(None, None)  # type: ignore[arg-type]  # is not due
        activity.end()
    ends.set()
    watch.join(10.0)
    assert (AgreeOnState.__call__, Activity.step) == (agree, step)
    (seconds,) = found
    assert {*seconds} == {*THREADS, NOTES, COMPARISONS, guard_worker.PROCESS}
    assert 0 <= seconds[THREADS[0]] < 0.1
    assert seconds[NOTES] < seconds[guard_worker.PROCESS]


def test_shares_are_those_of_the_process_and_their_spread_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    turns = count(1)

    def measured(flags: Sequence[str], iterations: int) -> Mapping[str, float]:
        return {THREADS[0]: 0.01 * next(turns), NOTES: 0.02, guard_worker.PROCESS: 4.0}

    monkeypatch.setattr(guard_cost, "seconds_of_run", measured)
    guard_cost.main(["--turns", "3", "--json", str(tmp_path / "result.json")])
    printed = capsys.readouterr().out
    assert "peer-watch                   0.500 % of the CPU time (0.250 to 0.750)" in printed
    assert "all guards                   1.000 % of the CPU time (0.750 to 1.250)" in printed
    assert len(json.loads((tmp_path / "result.json").read_text())["shares"]) == 3


def test_a_run_that_fails_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(MachineError, match="a run of the benchmark failed") as caught:
        guard_cost.seconds_of_run([], 1)
    assert caught.value.found == "exit codes [1, 1]"
