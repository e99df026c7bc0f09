"""Published steps beside estimates: no row is compared with a constant that was fitted to it."""

import json
import statistics
from pathlib import Path

import pytest

from benchmarks import published_steps
from benchmarks.published_steps import H100, Row, Table, compared, main, rehearsed_row

TINY = Table(
    "nobody",
    H100,
    ("--seq-length", "64", "--max-position-embeddings", "64", "--vocab-size", "127"),
    counts_recomputation=False,
    rows=tuple(Row(f"{n} layers", 4, 64, n, 2, 1, 8, 16, 0.1 * n) for n in (1, 2, 3)),
)


def test_the_estimate_of_a_row_at_the_efficiency_it_needs_is_the_published_time() -> None:
    step = rehearsed_row(TINY, TINY.rows[1])
    needed = step.needed_efficiency(H100)
    if needed < 1:  # communication alone may take longer than the published step
        assert step.estimate(H100, needed) == pytest.approx(step.seconds)
    # Products of 2 layers with full attention, and of a vocabulary padded to 256; 3 passes of 2.
    tokens, hidden = 64, 64
    products = 2 * (12 * hidden**2 + 2 * tokens * hidden) + hidden * 256
    assert step.seconds == pytest.approx(6 * products * tokens * 16 / (0.2e12 * 8))


def test_a_row_is_estimated_with_what_the_others_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = compared(TINY)["rows"]
    needed = [row["needed_efficiency"] for row in rows]
    assert rows[0]["efficiency_of_other_rows"] == statistics.median(needed[1:])
    for row in rows:
        ratio = row["estimated_seconds"] / row["published_seconds"]
        assert row["error"] == pytest.approx(ratio - 1)
    monkeypatch.setattr(published_steps, "TABLES", (TINY,))
    main(["--rows", "2", "--json", str(tmp_path / "found.json")])
    assert "nobody" in capsys.readouterr().out
    (table,) = json.loads((tmp_path / "found.json").read_text())["tables"]
    assert [row["model"] for row in table["rows"]] == ["1 layers", "2 layers"]
