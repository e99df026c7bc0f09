"""The benchmark of guards: each kind in turns, and ratios of medians."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.reliability import guard_cost
from megatron.errors import MachineError


def test_kinds_are_run_in_turns_and_compared_by_their_medians(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs: list[bool] = []

    def measured(flags: Sequence[str], iterations: int) -> float:
        runs.append(bool(flags))
        return 0.1 if flags else 0.101

    monkeypatch.setattr(guard_cost, "seconds_of_step", measured)
    guard_cost.main(["--turns", "2", "--json", str(tmp_path / "result.json")])
    assert runs == [False, True, True, True, True, False]
    assert "guards         101.00 ms, 1.0100 of none" in capsys.readouterr().out
    assert json.loads((tmp_path / "result.json").read_text())["medians"]["none"] == 0.1


def test_a_run_that_fails_ends_the_benchmark() -> None:
    with pytest.raises(MachineError, match="a run of the benchmark failed"):
        guard_cost.seconds_of_step(["--no-such-flag"], 1)
