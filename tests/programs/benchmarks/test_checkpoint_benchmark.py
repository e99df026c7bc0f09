"""The arithmetic of benchmarks/checkpoint.py, on a small state; figures need a calm machine."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import checkpoint
from benchmarks.checkpoint import MIB, Round, Stall, Taken, Way


def test_rates_are_of_medians_and_ratios_of_turns_in_one_round() -> None:
    def of(raw: float, ours: float) -> dict[str, Taken]:
        ways = {"raw": raw, "ours": ours, "torch.save": 4.0, "DCP": 8.0}
        return {name: Taken(seconds, seconds / 10) for name, seconds in ways.items()}

    rounds = [
        Round(of(1.0, 2.0), of(2.0, 2.0), of(1.0, 2.0), Stall(0.1, 0.1, 1.0)),
        Round(of(3.0, 4.0), of(2.0, 2.5), of(1.0, 4.0), Stall(0.4, 0.2, 4.0)),
        Round(of(2.0, 2.0), of(1.0, 4.0), of(1.0, 8.0), Stall(0.4, 0.1, 1.0)),
    ]
    summary = checkpoint.summarize(rounds, 8 * MIB)
    rates, ratios = summary.rates, summary.ratios
    assert rates["save"] == {"raw": 4.0, "ours": 4.0, "torch.save": 2.0, "DCP": 1.0}
    assert rates["load"]["ours"] == 8 / 2.5
    assert ratios["save"]["ours"] == 0.75  # of 0.5, 0.75 and 1
    assert ratios["load"]["ours"] == 0.8  # of 1, 0.8 and 0.25
    assert ratios["again"]["ours"] == 0.25
    assert summary.cpu["load"]["ours"] == pytest.approx(0.25)
    assert summary.stall == pytest.approx((0.1, 0.05, 0.5))  # first: of 0.05, 0.1 and 0.2
    lines = checkpoint.table(summary, 8 * MIB, 3)
    assert "| ours | 4 | 0.75 | 0.20 | 3 | 0.80 | 0.25 | 2 | 0.25 | 0.40 |" in lines
    assert "save: missed: 75% of raw writes, 85% wanted" in lines
    assert "--async-save: reached: training stands still for 10% of the time" in lines[-1]
    assert "50% without memory made before" in lines[-1]


def test_every_way_comes_before_and_after_its_neighbours() -> None:
    assert checkpoint.order(0) == list(checkpoint.WAYS)
    assert checkpoint.order(1) == checkpoint.order(0)[::-1]
    assert checkpoint.order(2) == checkpoint.order(0)


def test_a_state_has_about_the_bytes_that_are_asked_for() -> None:
    for mib in (1, 40):
        state = checkpoint.make_state(mib * MIB, seed=1)
        assert mib <= checkpoint.bytes_of(state) / MIB <= 1.1 * mib
        assert len(state) % 6 == 0
        other = checkpoint.make_state(mib * MIB, seed=2)
        assert not any(torch.equal(tensor, other[name]) for name, tensor in state.items())


def test_all_ways_load_what_they_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept.json"
    flags = ["--mib", "1", "--rounds", "2", "--dir", str(tmp_path), "--json", str(kept)]
    checkpoint.main(flags)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    found = json.loads(kept.read_text())
    assert found["bytes"] >= MIB
    for one in found["rounds"]:
        for what in checkpoint.PARTS:
            assert set(one[what]) == set(checkpoint.WAYS)
            assert min(taken["seconds"] for taken in one[what].values()) > 0
        assert min(one["stall"].values()) > 0
    assert set(found["summary"]["stall"]) == {"first", "next", "unprepared"}
    assert "| DCP |" in capsys.readouterr().out


def test_a_way_that_loads_something_else_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = Way(lambda folder, state: None, lambda folder, state: None)
    monkeypatch.setattr(checkpoint, "WAYS", {"raw": idle})
    state = checkpoint.make_state(MIB, seed=1)
    with pytest.raises(ValueError, match="raw loads other values than it saved"):
        checkpoint.measure(tmp_path, state, checkpoint.make_state(MIB, seed=2), 0)


def test_a_raw_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"too few")
    with pytest.raises(EOFError, match="ends before the state does"):
        checkpoint.load_raw(tmp_path, {"x": torch.zeros(10)})
