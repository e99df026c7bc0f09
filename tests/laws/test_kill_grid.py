"""The grid of faults sees what it should: flipped bits are found; without digests they are not."""

import random
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.checkpoint import storage
from megatron.config.checkpoint import Verification
from tests.laws import kill_grid
from tests.laws.kill_grid import Result

FLIPS = 60


def test_every_flipped_bit_is_found_before_a_tensor_changes(tmp_path: Path) -> None:
    results = list(kill_grid.flipped(tmp_path / "run", FLIPS, random.Random(1)))
    assert [result for result in results if not result.is_good] == []
    files = {result.what.rpartition(" of ")[2] for result in results}
    assert len(results) == FLIPS
    assert len(files) >= 4, "of every kind"


def test_without_digests_flips_of_weights_pass_unnoticed(tmp_path: Path) -> None:
    """What the law above would say if files were trusted by their lengths."""
    real = storage.open_checkpoint

    def trusting(folder: Path, **how: object) -> storage.OpenCheckpoint:
        return real(folder, verification=Verification.SIZE, **how)  # type: ignore[arg-type]

    with patch.object(storage, "open_checkpoint", trusting):
        results = list(kill_grid.flipped(tmp_path / "run", FLIPS, random.Random(1)))
    assert sum(not result.is_good for result in results) > FLIPS / 4


@pytest.mark.parametrize("beside", [False, True])
def test_a_kill_at_a_random_moment_loses_nothing(tmp_path: Path, beside: bool) -> None:
    assert kill_grid.killed(tmp_path / "run", beside, 1, 0.02) in ("former", "new")


def test_a_checkpoint_that_is_not_what_was_saved_is_a_loss(tmp_path: Path) -> None:
    with patch.object(kill_grid, "loaded", side_effect=AssertionError("iteration 100 differs")):
        found = kill_grid.killed(tmp_path / "run", False, 0, "before the first byte")
    assert found == "lost: iteration 100 differs"
    assert not Result("kind", "what", found).is_good


def test_the_table_counts_what_came_of_each_kind(tmp_path: Path) -> None:
    results = [
        Result("a", "1", "former"),
        Result("a", "2", "new"),
        Result("a", "3", "lost: x"),
        Result("b", "4", "found"),
    ]
    assert kill_grid.table(results)[2:] == [
        "| a | 3 | 1 | 1 | 0 | 1 |",
        "| b | 1 | 0 | 0 | 1 | 0 |",
    ]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{kill_grid.MARKS[0]}\nold\n{kill_grid.MARKS[1]}\nafter\n")
    kill_grid.write(page, ["new"])
    assert page.read_text() == (
        f"before\n{kill_grid.MARKS[0]}\n\nnew\n\n{kill_grid.MARKS[1]}\nafter\n"
    )
    assert kill_grid.MARKS[0] in kill_grid.PAGE.read_text()
    assert kill_grid.MARKS[1] in kill_grid.PAGE.read_text()
