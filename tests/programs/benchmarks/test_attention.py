"""The benchmark of attention measures every length in every dtype that is asked for."""

import json
from pathlib import Path

import pytest

from benchmarks import attention
from benchmarks.attention import main


def test_every_length_is_measured_beside_its_operations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SQUARE", 64)  # a product of 2 GFLOP is for figures
    file = tmp_path / "out" / "attention.json"
    main(["--tokens", "16", "--lengths", "8", "32", "--rounds", "1", "--json", str(file)])
    results = json.loads(file.read_text())["results"]
    assert [(one["dtype"], one["shape"]) for one in results] == [
        (dtype, [batch, 8, length, 64])
        for dtype in ("fp32", "bf16")
        for batch, length in ((2, 8), (1, 32))
    ]
    assert all(one["ms"][who] > 0 for one in results for who in ("ours", "eager", "floor"))
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(results)
