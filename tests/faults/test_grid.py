"""A cell of the grid of faults, and what its table says; `make test-faults` runs all cells."""

from pathlib import Path

import pytest

from tests.faults import memory_group
from tests.faults.grid import Cell, Expected, Result, cells, left_out, run_all, table
from tests.faults.injection import FAULTS, FOR_MEMORY, IN_WORKERS, NETWORK, PHASES
from tests.faults.memory_group import parent_of_groups

BUSY = 6.0  # times the stated seconds, beside other tests
GOES_ON, ENDS = "SIGKILL, mid-save, rank 1", "gradient is NaN, mid-step, rank 0"


def test_there_are_at_least_eighty_cells_and_every_fault_is_in_one() -> None:
    found = list(cells())
    assert len(set(map(str, found))) == len(found) >= 80
    assert {cell.fault for cell in found} == {*FAULTS, *IN_WORKERS} - {*left_out()}
    assert {cell.phase for cell in found} == set(PHASES)


def test_without_root_what_needs_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert {*left_out()} == {NETWORK, FOR_MEMORY}
    assert not {cell.fault for cell in cells()} & {NETWORK, FOR_MEMORY}


@pytest.mark.parametrize(
    ("files", "parent"),
    [
        ({}, None),
        ({"a/b/memory.limit_in_bytes": "9", "memory.limit_in_bytes": "9"}, "a/b"),
        # A group of v2 that does not hand the controller down has processes of its own.
        ({"a/b/cgroup.subtree_control": "cpu\n", "a/cgroup.subtree_control": "cpu memory\n"}, "a"),
        ({"a/b/memory.max": "9", "a/cgroup.subtree_control": ""}, None),
    ],
)
def test_the_nearest_group_that_can_hold_limits_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], parent: str | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    folders = [tmp_path / "a" / "b", tmp_path / "a", tmp_path]
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("megatron.host.cgroup_folders", lambda controller: iter(folders))
    assert parent_of_groups() == (parent and tmp_path / parent)


def test_the_group_of_a_run_is_removed_with_the_limits_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_group, "parent_of_groups", lambda: tmp_path)
    with memory_group.limited_group(Path("place", "cell")):
        assert [*tmp_path.iterdir()] == [tmp_path / "place-cell"]
    assert [*tmp_path.iterdir()] == []


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
