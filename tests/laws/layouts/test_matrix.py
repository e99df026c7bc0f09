"""The differential matrix: compositions of parallelism against one process, a fast slice of it.

Every feasible pair of values of every axis, with at most two ranks along each, in float64, where
rounding cannot hide a wrong reduction, in as few cases as hold them. The cases that hold most pairs
run in `make test`, the others in `make test-all`. `make test-matrix` runs every triple with up to
four ranks along an axis, and every pair in float32 and bfloat16 (tests/laws/layouts/matrix.py).
Negative controls show that what is wrong is seen.
"""

import math
from collections.abc import Sequence
from itertools import combinations as choices
from pathlib import Path

import pytest

from tests.laws.layouts import matrix
from tests.support.faults import FAULTS, train_with_faults
from tests.support.matrix import (
    AXES,
    GRID_AXES,
    LARGEST,
    TRUTH,
    WORLD_SIZES,
    Case,
    Difference,
    Precision,
    Verdict,
    combinations,
    compare,
    cover,
    grids,
    held,
    is_feasible,
    runs_of,
)
from tests.support.ranks import run_on_ranks
from tests.support.tiny import FP64, Record, write_tiny_corpus

TWO = 2  # ranks along one axis, at the most
PAIRS = cover(2, largest=TWO)
FIRST = 18  # cases in `make test`: each of `cover` holds as many new pairs as any after it
DEADLINE_S = 240.0  # of a start of processes, with all the cases of one world size


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def verdicts(cases: Sequence[Case], corpus: str) -> list[Verdict]:
    models = sorted({case.model for case in cases})
    return list(matrix.run_cases(cases, TRUTH, corpus, matrix.train_alone(models, corpus)))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(PAIRS[:FIRST], id="most pairs"),
        pytest.param(PAIRS[FIRST:], marks=pytest.mark.wide, id="the others"),
    ],
)
def test_every_pair_of_compositions_trains_what_one_process_trains(
    corpus: str, pairs: Sequence[Case], world_size: int
) -> None:
    cases = [case for case in pairs if case.grid.world_size == world_size]
    found = verdicts(cases, corpus)
    assert [verdict.case for verdict in found] == cases
    wrong = [str(verdict) for verdict in found if verdict.first is not None]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)} compositions differ", *wrong])
    # No evaluation is left out, and no parameter, and nothing that the optimizer keeps of it.
    for verdict in found:
        names = [difference.where for difference in verdict.found]
        assert sum(name.startswith("loss of evaluation") for name in names) == 3
        model = [name for name in names if name.startswith("model/")]
        kept = [name for name in names if name.startswith("optimizer/")]
        assert len(model) > 20
        assert len(kept) == (2 if verdict.case.model.optimizer == "adamw" else 1) * len(model)


# Faults in a sum that is dropped in another fault.
TWINS = [name for name in FAULTS if "twice" in name or "averaged" in name]


@pytest.mark.parametrize(
    ("faults", "world_size"),
    [
        pytest.param(names, world_size, marks=marks, id=f"{what}-{world_size}")
        for what, names, marks in (
            ("each place", [name for name in FAULTS if name not in TWINS], []),
            ("twins", TWINS, [pytest.mark.wide]),
        )
        for world_size in sorted({Case.of(FAULTS[name].case).grid.world_size for name in names})
    ],
)
def test_what_is_done_wrong_is_seen_and_where(
    corpus: str, faults: Sequence[str], world_size: int
) -> None:
    cases = {name: Case.of(FAULTS[name].case) for name in faults}
    names = [name for name, case in cases.items() if case.grid.world_size == world_size]
    # The same without a fault, last: whatever was put in is out again.
    sound = list(dict.fromkeys(cases[name] for name in names))
    wanted = [*((name, cases[name]) for name in names), *((None, case) for case in sound)]
    configs = runs_of([case for _, case in wanted], corpus)
    runs = [(name, config) for (name, _), config in zip(wanted, configs)]
    by_rank = run_on_ranks(world_size, train_with_faults, runs, timeout_s=DEADLINE_S)
    alone = matrix.train_alone(sorted({case.model for case in sound}), corpus)
    unseen = []
    for (name, case), *records in zip(wanted, *by_rank):
        first = compare(case, TRUTH, records, alone[case.model]).first
        shows_in = FAULTS[name].shows_in if name else None
        if (first and first.where) != shows_in:
            unseen.append(f"{name or 'nothing'} ({case}) shows in {first}, not in {shows_in}")
    assert not unseen, "\n".join(unseen)


@pytest.mark.parametrize(
    ("strength", "largest"),
    [
        (2, TWO),
        pytest.param(2, LARGEST, marks=pytest.mark.wide),
        pytest.param(3, LARGEST, marks=pytest.mark.wide),
    ],
)
def test_the_pairs_are_all_of_them_and_the_triples_too(strength: int, largest: int) -> None:
    cases = cover(strength, largest=largest)
    found = {combination for case in cases for combination in held(case, strength)}
    # Counted another way than `cover` does: by what any feasible case holds.
    of_grids = {
        part
        for grid in grids(largest)
        for size in range(strength + 1)
        for part in choices(grid._asdict().items(), size)
    }
    free = [axis for axis in AXES if axis not in GRID_AXES]
    expected = sum(
        _values_of(axes) for part in of_grids for axes in choices(free, strength - len(part))
    )
    assert len(found) == expected
    assert found == set(combinations(strength, largest))
    assert len(cases) == len(set(cases))


def _values_of(axes: Sequence[str]) -> int:
    return math.prod(len(AXES[axis]) for axis in axes)


def test_the_first_cases_hold_every_value_and_most_pairs() -> None:
    first, every = ({pair for case in cases for pair in held(case, 2)}
                    for cases in (PAIRS[:FIRST], PAIRS))  # fmt: skip
    assert {value for pair in first for value in pair} == {v for pair in every for v in pair}
    assert len(first) >= 0.85 * len(every)
    assert {case.grid.world_size for case in PAIRS[:FIRST]} == set(WORLD_SIZES)


def test_the_same_cases_are_found_every_time() -> None:
    assert cover.__wrapped__(2, largest=TWO) == PAIRS
    assert cover.__wrapped__(2, largest=TWO, seed=1) != PAIRS


def test_every_case_is_feasible_and_is_named_by_its_words() -> None:
    for case in PAIRS:
        assert is_feasible(case.grid)
        assert Case.of(str(case)) == case
    assert {case.grid.world_size for case in PAIRS} == set(WORLD_SIZES)
    with pytest.raises(ValueError, match="no axis has a value that is called 2f2b"):
        Case.of("tp2 2f2b")
    with pytest.raises(ValueError, match="values that exclude each other: tp1 dp2 sp"):
        Case.of("tp1 dp2 sp")


def test_a_difference_is_named_with_the_command_that_runs_its_case_again() -> None:
    case = Case.of("dp2 sgd")
    fine = Difference("loss of step 0", FP64 / 2, FP64, is_relative=True)
    nothing = Difference("loss of step 1", math.nan, FP64, is_relative=True)
    wrong = Difference("a.weight", 1e-3, FP64, is_relative=True)
    assert Verdict(case, "fp64", (fine,)).first is None
    assert Verdict(case, "fp64", (fine, nothing)).first is nothing
    message = str(Verdict(case, "fp64", (fine, wrong)))
    assert "first in a.weight: 1.0e-03 apart, 1e-09 allowed (1 of 2 differ)" in message
    assert f'python -m tests.laws.layouts.matrix --precision fp64 --case "{case}"' in message


def test_the_table_counts_and_is_written_between_its_marks(tmp_path: Path) -> None:
    one, other = Case.of("dp2"), Case.of("tp2 dp2 sgd")
    wrong = Difference("loss of step 0", 1e-3, FP64, is_relative=True)
    fine = Difference("loss of step 0", 3e-12, FP64, is_relative=True)
    lines = matrix.table([Verdict(one, "fp64", (fine,)), Verdict(other, "fp64", (wrong,))])
    assert "| dp | 2 | 2 (1) | 3e-12 |" in lines
    assert "| tp | 1 | 1 | 3e-12 |" in lines
    assert "| tp | 4 | 0 | - |" in lines
    # Of tp: 1 and 2, each with one value of sequence, and with a dp; of dp with tp one differs.
    (row,) = [
        line for line in lines if line.startswith("| tp | ") and line.count("|") == len(AXES) + 1
    ]
    assert row.startswith("| tp | **1 of 2** | **1 of 2** |")
    page = tmp_path / "page.md"
    begin, end = matrix.MARKS
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    matrix.write(page, lines)
    text = page.read_text()
    assert text.startswith(f"before\n{begin}\n")
    assert text.endswith(f"{end}\nafter\n")
    assert "old" not in text
    assert "\n".join(lines) in text
    page.write_text("nothing")
    with pytest.raises(ValueError, match="has no place for the matrix"):
        matrix.write(page, lines)


def test_a_crash_is_found_in_its_own_case_and_the_others_are_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = [Case.of("dp2"), Case.of("dp2 sgd"), Case.of("dp2 gqa")]
    starts = []

    def runs(world_size: int, body: object, runs: list[tuple[str, object]], **_: float) -> object:
        starts.append(len(runs))
        if any("gqa" in name for name, _ in runs):
            raise AssertionError("rank 1 of 2 died")
        return [[Record() for _ in runs]] * world_size

    monkeypatch.setattr(matrix, "run_on_ranks", runs)
    monkeypatch.setattr(matrix, "runs_of", lambda cases, *_: [None] * len(cases))
    monkeypatch.setattr(matrix, "compare", lambda case, *_: Verdict(case, "fp64", ()))
    alone = {case.model: Record() for case in cases}
    found = list(matrix.run_cases(cases, TRUTH, "", alone))
    assert starts == [3, 1, 1, 1]
    assert [verdict.first is None for verdict in found] == [True, True, False]
    assert "a rank failed: rank 1 of 2 died" in str(found[-1])


def test_the_program_says_what_differs_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = iter([0.0, 1.0])

    def judged(cases: Sequence[Case], precision: Precision, *_: object) -> list[Verdict]:
        found = (Difference("loss of step 0", next(sizes), FP64, is_relative=True),)
        return [Verdict(case, precision.name, found) for case in cases]

    monkeypatch.setattr(matrix, "train_alone", lambda *_: {})
    monkeypatch.setattr(matrix, "run_cases", judged)
    for code, text in ((0, "0 differ from one process"), (1, "DIFFERS: fp64 tp1 pp1 cp1 dp2 tied")):
        with pytest.raises(SystemExit) as ended:
            matrix.main(["--precision", "fp64", "--case", "dp2"])
        assert ended.value.code == code
        assert text in capsys.readouterr().out
    with pytest.raises(SystemExit):
        matrix.main(["--case", "dp2", "--write"])
    assert "not of a part of it" in capsys.readouterr().err
