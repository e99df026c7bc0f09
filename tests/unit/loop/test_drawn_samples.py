"""Draws of ranks against the plan: what is skipped, drawn twice or received otherwise is named."""

import numpy as np
import pytest

from megatron.loop.drawn_samples import DrawReport, differences_from_plan, id_summary

SIZE, REPLICAS, STAGES = 3, 2, 2


def ids(replica: int) -> list[int]:
    """The samples of a replica in two micro-batches."""
    return [at * SIZE + each for at in (replica, REPLICAS + replica) for each in range(SIZE)]


def report(stage: int, replica: int, drawn: list[int] | None = None) -> DrawReport:
    """The report of a reader that drew `drawn`, or what was planned."""
    of_all = id_summary(np.arange(2 * SIZE * REPLICAS))
    planned = id_summary(np.array(ids(replica)))
    there = planned if drawn is None else id_summary(np.array(drawn))
    return DrawReport(stage, replica, 2, replica, there, planned, of_all)


def grid() -> list[DrawReport]:
    """All ranks; of two that share a replica and a stage only the first one reads."""
    readers = [report(stage, replica) for stage in range(STAGES) for replica in range(REPLICAS)]
    return [one if reads else DrawReport(*one[:4]) for one in readers for reads in (True, False)]


def test_ranks_that_draw_the_plan_have_no_problem() -> None:
    assert list(differences_from_plan(grid())) == []


@pytest.mark.parametrize(
    "drawn",
    [ids(1)[:-1], [*ids(1), 12], [*ids(1)[:-1], 12], [*ids(1)[:-1], ids(1)[0]], ids(0), []],
)
def test_one_other_sample_is_found_and_its_rank_named(drawn: list[int]) -> None:
    reports = grid()
    reports[2] = report(0, 1, drawn)
    each, together = differences_from_plan(reports)
    there = id_summary(np.array(drawn, dtype=np.int64))
    assert each == f"rank 2 drew {there}, planned were 6 samples (3 to 11)"
    assert together == (
        f"all replicas of pipeline stage 0 together drew {6 + len(drawn)} samples that are not "
        "the 12 samples (0 to 11) of the plan, each once"
    )


def test_two_ranks_that_take_one_replicas_part_are_found() -> None:
    reports = grid()
    reports[2:4] = reports[0:2]  # each has what it planned, and half of the samples is missing
    (problem,) = differences_from_plan(reports)
    assert "pipeline stage 0 together drew 12 samples that are not" in problem


@pytest.mark.parametrize("change", [{"checksum": 7}, {"batches": 1}])
def test_ranks_of_a_replica_that_received_other_batches_are_named(change: dict[str, int]) -> None:
    reports = grid()
    reports[7] = reports[7]._replace(**change)
    assert list(differences_from_plan(reports)) == [
        "ranks 2, 3, 6 and 7 of replica 1 received different batches"
    ]


def test_a_summary_tells_sets_of_equal_borders_and_sums_apart() -> None:
    assert id_summary(np.array([1, 4, 2, 9])) == id_summary(np.array([9, 1, 2, 4]))
    assert id_summary(np.array([1, 4, 5, 9])) != id_summary(np.array([1, 3, 6, 9]))
