"""Two cells of the grid of faults, and what its table says; `make test-faults` runs all cells."""

from pathlib import Path

import pytest

from tests.faults.grid import Cell, Expected, Result, cells, run_all, table
from tests.faults.injection import FAULTS, IN_WORKERS, PHASES

BUSY = 6.0  # times the stated seconds, beside other tests
TRIED = ("SIGKILL, mid-save, rank 1", "gradient is NaN, mid-step, rank 0")


def test_there_are_at_least_eighty_cells_and_every_fault_is_in_one() -> None:
    found = list(cells())
    assert len(set(map(str, found))) == len(found) >= 80
    assert {cell.fault for cell in found} == {*FAULTS, *IN_WORKERS}
    assert {cell.phase for cell in found} == set(PHASES)


def test_a_run_goes_on_and_another_ends_as_is_stated(tmp_path: Path) -> None:
    chosen = [cell for cell in cells() if str(cell) in TRIED]
    assert len(chosen) == len(TRIED)
    results = run_all(tmp_path, chosen, lambda text: None, times=BUSY)
    assert [result.problem for result in results] == ["", ""]


def test_an_end_that_is_not_the_stated_one_is_bad(tmp_path: Path) -> None:
    wrong = Cell("exception", "start", 1, Expected(10.0, (0,)))
    (result,) = run_all(tmp_path, [wrong], lambda text: None, times=BUSY)
    assert result.problem.startswith("exit code 1, not 0")
    assert "| exception | BAD |" in table([result])[-1]


@pytest.mark.parametrize(
    ("statuses", "entry"),
    [((0,), "goes on, 2.0 s"), ((0, 75), "goes on, 2.0 s"), ((65,), "ends 65, 2.0 s")],
)
def test_an_entry_of_the_table_says_what_came_of_it(statuses: tuple[int, ...], entry: str) -> None:
    cells_of_fault = [Cell("hang", "start", rank, Expected(9.0, statuses)) for rank in (0, 1)]
    results = [Result(cell, 1.0 + cell.rank, "") for cell in cells_of_fault]
    assert table(results)[-1] == f"| hang | {entry} |  |  |  |  |"
