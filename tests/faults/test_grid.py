"""A cell of the grid of faults, and what its table says; `make test-faults` runs all cells."""

from pathlib import Path

import pytest

from tests.faults.grid import Cell, Expected, Result, cells, run_all, table
from tests.faults.injection import FAULTS, IN_WORKERS, PHASES

BUSY = 6.0  # times the stated seconds, beside other tests
GOES_ON, ENDS = "SIGKILL, mid-save, rank 1", "gradient is NaN, mid-step, rank 0"


def test_there_are_at_least_eighty_cells_and_every_fault_is_in_one() -> None:
    found = list(cells())
    assert len(set(map(str, found))) == len(found) >= 80
    assert {cell.fault for cell in found} == {*FAULTS, *IN_WORKERS}
    assert {cell.phase for cell in found} == set(PHASES)


def test_a_run_goes_on_as_is_stated_and_an_end_that_is_not_stated_is_bad(tmp_path: Path) -> None:
    """Both beside one run without a fault."""
    (stated,) = (cell for cell in cells() if str(cell) == GOES_ON)
    wrong = Cell("exception", "start", 1, Expected(10.0, (0,)))
    found, bad = run_all(tmp_path, [stated, wrong], lambda text: None, times=BUSY)
    assert found.problem == ""
    assert bad.problem.startswith("exit code 1, not 0")
    assert "| exception | BAD |" in table([bad])[-1]


@pytest.mark.wide  # a cell as all others of `make test-faults`
def test_a_run_ends_as_is_stated_and_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    (stated,) = (cell for cell in cells() if str(cell) == ENDS)
    (found,) = run_all(tmp_path, [stated], lambda text: None, times=BUSY)
    assert found.problem == ""


@pytest.mark.parametrize(
    ("statuses", "entry"),
    [((0,), "goes on, 2.0 s"), ((0, 75), "goes on, 2.0 s"), ((65,), "ends 65, 2.0 s")],
)
def test_an_entry_of_the_table_says_what_came_of_it(statuses: tuple[int, ...], entry: str) -> None:
    cells_of_fault = [Cell("hang", "start", rank, Expected(9.0, statuses)) for rank in (0, 1)]
    results = [Result(cell, 1.0 + cell.rank, "") for cell in cells_of_fault]
    assert table(results)[-1] == f"| hang | {entry} |  |  |  |  |"
