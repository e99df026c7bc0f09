"""The grid of kills loses nothing in any format, and reports a loss."""

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.checkpoint.folder import run_folder as folders
from tests.laws.checkpoints import kill_grid
from tests.laws.checkpoints.kill_grid import Ours, RandomMoment, Result, Run
from tests.support.checkpoints.save_faults import MOMENTS_OF
from tests.support.ranks import run_on_ranks
from tests.support.tiny import assert_went_on, train_all


@pytest.mark.parametrize("beside", [False, True])
def test_a_kill_at_a_random_moment_loses_nothing(tmp_path: Path, beside: bool) -> None:
    """Which of the two is found depends on how long each save takes, so either is right."""
    assert Ours(beside=beside).killed(tmp_path / "run", 1, RandomMoment(0.2)) in kill_grid.GOOD


@pytest.mark.slow
@pytest.mark.parametrize("at", range(4))
def test_a_kill_at_a_random_moment_of_a_commit_loses_nothing(tmp_path: Path, at: int) -> None:
    """Uniform draws over a whole save seldom meet its commit, which is short."""
    way = kill_grid.ways(tmp_path)[at]
    folder = tmp_path / "run"
    assert way.killed(folder, 0, RandomMoment(0.1, of_commit=True)) in kill_grid.GOOD
    assert kill_grid.commit_began(folder)


def test_a_random_moment_is_a_share_of_what_the_save_before_it_took() -> None:
    with ExitStack() as hit, patch.object(kill_grid, "kill_after") as kill:
        kill_grid.lay_in_wait(hit, "megatron", RandomMoment(0.5), former_s=2.0)
    kill.assert_called_once_with(0.5 * kill_grid.OVERTIME * 2.0)


def test_random_kills_come_in_saves_and_in_commits_of_every_way() -> None:
    every = kill_grid.ways(Path("nowhere"))
    kills = [*kill_grid.random_kills(every, 80, random.Random(1234))]
    assert len(kills) == 80
    for way in every:
        of_way = [(victim, when) for each, victim, when in kills if each is way]
        assert {victim for victim, when in of_way if when.of_commit} == {0}
        assert {victim for victim, when in of_way if not when.of_commit} == {0, 1}
        assert sum(when.of_commit for _, when in of_way) == len(of_way) // 2


def test_a_way_whose_random_kills_never_came_in_a_commit_is_named() -> None:
    results = [
        Result("at a random moment, training waits", "rank 0", "former"),
        Result("at a random moment, training waits", "rank 0", "new", in_commit=True),
        Result("at a random moment, Megatron's layout", "rank 1", "former"),
        Result("at a named moment, beside the training", "rank 1", "former"),
    ]
    assert kill_grid.without_commit(results) == ["Megatron's layout"]
    assert kill_grid.without_commit(results[:2]) == []


# A moment of each rank, and one between two of what a commit consists of.
RUNS = {
    "megatron": [(1, "half of a file is written"), (0, "the checkpoint has its name")],
    "deepspeed": [(1, "a file is durable"), (0, "DeepSpeed's new tracker lies beside")],
}


@pytest.mark.slow
@pytest.mark.parametrize("form", RUNS)
def test_a_run_whose_save_in_anothers_layout_was_killed_goes_on_exactly(
    tmp_path: Path, form: str
) -> None:
    run = Run(form, tmp_path / "corpus")
    for at, (victim, moment) in enumerate(RUNS[form]):
        assert run.killed(tmp_path / str(at), victim, moment) == "former", moment
    assert run.killed(tmp_path / "after", 0, _last(form)) == "new"


def _last(form: str) -> str:
    """The latest of the named moments, after which the new one is the latest."""
    return [name for name, moment in MOMENTS_OF[form].items() if moment.is_committed][-1]


def test_a_checkpoint_that_is_not_what_was_saved_is_a_loss(tmp_path: Path) -> None:
    with patch.object(kill_grid, "loaded", side_effect=AssertionError("iteration 100 differs")):
        found = Ours(beside=False).killed(tmp_path / "run", 0, "before the first byte")
    assert found == "lost: iteration 100 differs"
    assert not Result("kind", "what", found).is_good


def nobody_dies(*args: Any) -> None:
    """A body for `run_on_ranks` that has no fault."""


def another_fault(*args: Any) -> None:
    """A body for `run_on_ranks` that fails by itself."""
    raise ValueError("by itself")


@pytest.mark.parametrize(
    ("body", "found"), [(nobody_dies, "nobody was killed"), (another_fault, "another failure")]
)
def test_a_kill_that_did_not_come_is_no_result(body: Callable[..., None], found: str) -> None:
    end = kill_grid.end_of(body)
    assert end is not None
    assert end.startswith(found)
    assert not Result("kind", "what", end).is_good


def test_what_a_later_save_leaves_behind_is_seen(tmp_path: Path) -> None:
    (tmp_path / ".latest.0123abcd").touch()
    assert kill_grid.tidied(tmp_path) == "left behind: ['.latest.0123abcd']"
    folders.sweep(tmp_path)
    assert kill_grid.tidied(tmp_path) is None
    assert not tmp_path.exists()


def test_a_run_that_does_not_go_on_exactly_is_a_loss(tmp_path: Path) -> None:
    config = Run("megatron", tmp_path / "corpus").config()
    model = replace(config.parallel, tensor_model_parallel_size=1)
    other = replace(config.training, seed=config.training.seed + 1)
    alone = replace(config, parallel=model)
    ((*runs,),) = run_on_ranks(1, train_all, [alone, replace(alone, training=other)])
    whole_run, other_run = [runs[0]], [runs[1]]
    assert_went_on(whole_run, whole_run, last=kill_grid.STEPS)
    with pytest.raises(AssertionError, match="steps of 0"):
        assert_went_on(other_run, whole_run, last=kill_grid.STEPS)
    other_run[0].steps = whole_run[0].steps
    with pytest.raises(AssertionError, match=r"model/.* differ"):
        assert_went_on(other_run, whole_run, last=kill_grid.STEPS)


def test_there_is_a_moment_of_every_kind_in_every_format() -> None:
    for way in kill_grid.ways(Path("nowhere")):
        assert len(way.moments(0)) >= 15, way.spelled
        assert len(way.moments(1)) >= 9, way.spelled
    assert set(MOMENTS_OF) == {"sharded", *kill_grid.FOREIGN}


def test_the_table_counts_what_came_of_each_kind(tmp_path: Path) -> None:
    results = [
        Result("a", "1", "former"),
        Result("a", "2", "new", in_commit=True),
        Result("a", "3", "lost: x"),
        Result("b", "4", "new"),
    ]
    assert kill_grid.table(results)[2:] == [
        "| a | 3 | 1 | 1 | 1 | 1 |",
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
