"""A step's memory falls as sequences are shared, and the benchmark draws it."""

import json
from pathlib import Path

import pytest

from benchmarks.memory import context_parallel

# Beside halves of everything else each of two ranks holds the keys and values of the other, and
# the chunk of logits that its loss computes at a time.
MOST = 0.6


@pytest.mark.wide  # two starts that import torch, for a figure
def test_two_ranks_need_about_half_of_the_memory_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, report = tmp_path / "memory.png", tmp_path / "memory.json"
    flags = ["--lengths", "1024", "--sizes", "1", "2", "--png", str(picture)]
    context_parallel.main([*flags, "--json", str(report)])
    found = json.loads(report.read_text())["bytes"]["p2p"]
    share = found["2"]["1024"] / found["1"]["1024"]
    assert 0.5 <= share < MOST
    assert f"({share:.3f})" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
