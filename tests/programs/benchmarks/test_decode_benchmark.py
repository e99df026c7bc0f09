"""The benchmark of generation compares contestants that choose the same tokens."""

import json
from pathlib import Path

import pytest

from benchmarks.inference import decode
from megatron.errors import NumericsError


def test_contestants_generate_the_same_and_are_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "decode.json"
    flags = ["--dtype", "fp32", "--batch", "2", "--prompt", "5", "--new", "3", "--rounds", "1"]
    flags += ["--layers", "1", "--speculative-tokens", "2"]
    decode.main([*flags, "--json", str(report)])
    row = json.loads(report.read_text())["rows"][0]
    assert set(row["tokens_per_second"]) == {
        *("ours", "ours, not invariant", "transformers"),
        *("all proposed tokens right", "no proposed tokens right"),
    }
    assert all(speed > 0 for speed in row["tokens_per_second"].values())
    assert "fp32, batch 2: tokens/s ours" in capsys.readouterr().out


def test_contestants_that_choose_other_tokens_are_an_error() -> None:
    flags = decode._parser().parse_args(["--prompt", "3", "--new", "1"])
    contestants: dict[str, decode.Generator] = {
        "ours": lambda prompts, new: [[1]],
        "other": lambda prompts, new: [[2]],
    }
    with pytest.raises(NumericsError, match="contestants choose other tokens"):
        decode.measure(contestants, 1, flags, same_tokens=True)
    assert decode.measure(contestants, 1, flags, same_tokens=False)["ours_over"].keys() == {"other"}
