"""The benchmark of large models measures placements that choose the same tokens."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.inference import big_model
from megatron.errors import NumericsError
from megatron.initialize import shutdown_megatron
from tests.support.ranks import run_on_ranks

PLACEMENTS = ("resident", "some on disk")
WORDS = "--layers 6 --hidden 256 --dtype fp32 --prompt 5 --new 3"


def measured(folder: str) -> list[dict[str, Any]]:
    flags = big_model._parser().parse_args([*WORDS.split(), "--folder", folder, "--cpu-mib", "20"])
    big_model.VOCABULARY = 2000
    torch.set_num_threads(1)  # layers are small, and threads would wait for each other
    big_model.write_model(Path(folder) / "model", flags)
    rows = []
    for placement in PLACEMENTS:
        rows.append(big_model.measure(flags, placement))
        shutdown_megatron()
    return rows


@pytest.mark.slow
def test_placements_are_measured_and_choose_the_same_tokens(tmp_path: Path) -> None:
    (rows,) = run_on_ranks(1, measured, str(tmp_path))
    assert [row["placement"] for row in rows] == list(PLACEMENTS)
    assert all(row["tokens"] == rows[0]["tokens"] for row in rows)
    assert all(row["tokens_per_s"] > 0 and row["load_s"] > 0 for row in rows)
    whole, part = (row["resident_bytes"] for row in rows)
    assert whole > part > 0
    assert rows[1]["room_bytes"] > 0
    assert "some on disk" in big_model.line_of(rows[1])


def test_placements_that_choose_other_tokens_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    texts = iter(["1", "2", "3"])

    def run(words: list[str], **named: object) -> subprocess.CompletedProcess[str]:
        row = (
            '{"placement": "x", "load_s": 1, "peak_of_load_bytes": 1, "tokens_per_s": 1, '
            f'"peak_bytes": 1, "resident_bytes": 1, "tokens": [{next(texts)}]}}'
        )
        return subprocess.CompletedProcess(words, 0, f"a line of the log\n{row}\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(NumericsError, match="placements choose other tokens"):
        big_model.main(["--folder", str(tmp_path)])
