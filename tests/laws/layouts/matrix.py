"""The whole differential matrix: every triple in float64, every pair in float32 and bfloat16.

`python -m tests.laws.layouts.matrix` (or `make test-matrix`) prints a line for each composition and
ends with 1 if one of them trains something else than one process does. `--write` keeps the result
in docs/parallelism.md. The fast slice, and what shows that a difference is seen, is test_matrix.py.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import torch

from tests.support.matrix import (
    AXES,
    PRECISIONS,
    STEPS,
    TRUTH,
    WORLD_SIZES,
    Case,
    Difference,
    Model,
    Precision,
    Verdict,
    compare,
    cover,
    runs_alone,
    runs_of,
    train_named,
)
from tests.support.pages import write_between
from tests.support.ranks import run_on_ranks
from tests.support.tiny import Record, write_tiny_corpus

PAGE = Path(__file__).resolve().parents[3] / "docs" / "parallelism.md"
MARKS = ("<!-- matrix: written by `make test-matrix WRITE=1` -->", "<!-- matrix: end -->")
STRENGTH = {"fp64": 3, "fp32": 2, "bf16": 2}
BATCH = 8  # cases that share a start of processes
START_S, CASE_S = 60.0, 30.0  # allowed for a start, and for each case, on a busy machine

Alone = Mapping[Model, Sequence[Record]]


def main(argv: Sequence[str] | None = None) -> None:
    """Run what the flags ask for; exit code 1 if anything differs."""
    parser = _parser()
    flags = parser.parse_args(argv)
    if flags.write and (flags.case or flags.strength or flags.precision != list(PRECISIONS)):
        parser.error("--write keeps the result of the whole matrix, not of a part of it")
    started = time.monotonic()
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_tiny_corpus(Path(folder))
        for name in flags.precision:
            precision = PRECISIONS[name]
            strength = flags.strength or STRENGTH[name]
            cases = [flags.case] if flags.case else cover(strength, dense=precision.dense)
            print(f"{name}: {len(cases)} compositions", flush=True)
            models = sorted({case.model for case in cases})
            alone = train_alone(models, corpus, precision.alone or (name,))
            for verdict in run_cases(cases, precision, corpus, alone):
                verdicts.append(verdict)
                print(f"{time.monotonic() - started:6.0f} s {verdict}", flush=True)
    wrong = [verdict for verdict in verdicts if verdict.first is not None]
    took = f"{len(verdicts)} compositions in {(time.monotonic() - started) / 60:.1f} minutes"
    print("\n".join(["", *table(verdicts), "", f"{took}, {len(wrong)} differ from one process"]))
    for verdict in wrong:
        print(verdict)
    if flags.write:
        write(PAGE, [*table(verdicts), "", f"{took}, on {os.cpu_count()} cores."])
    sys.exit(1 if wrong else 0)


def train_alone(
    models: Sequence[Model], corpus: str, precisions: Sequence[str] = (TRUTH.name,)
) -> Alone:
    """What one process makes of each model, in each precision."""
    by_precision = []
    for name in precisions:
        configs = runs_alone(models, corpus, PRECISIONS[name])
        runs = [(str(model), config) for model, config in zip(models, configs)]
        (records,) = run_on_ranks(1, train_named, runs, timeout_s=START_S + CASE_S * len(runs))
        by_precision.append(records)
    return dict(zip(models, zip(*by_precision)))


def run_cases(
    cases: Iterable[Case], precision: Precision, corpus: str, alone: Alone
) -> Iterator[Verdict]:
    """A verdict on every case, in the order of the sizes of their worlds."""
    for world_size in WORLD_SIZES:
        here = [case for case in cases if case.grid.world_size == world_size]
        for at in range(0, len(here), BATCH):
            yield from _run_batch(here[at : at + BATCH], precision, corpus, alone)


def _run_batch(
    cases: Sequence[Case], precision: Precision, corpus: str, alone: Alone
) -> Iterator[Verdict]:
    runs = [(str(case), run) for case, run in zip(cases, runs_of(cases, corpus, precision))]
    world_size = cases[0].grid.world_size
    try:
        timeout_s = START_S + CASE_S * len(cases)
        by_rank = run_on_ranks(world_size, train_named, runs, timeout_s=timeout_s)
    except AssertionError as error:
        if len(cases) == 1:
            crash = Difference(f"a rank failed: {error}", float("inf"), 0.0)
            yield Verdict(cases[0], precision.name, (crash,))
            return
        # One of them ended the processes of all: each by itself.
        for case in cases:
            yield from _run_batch([case], precision, corpus, alone)
        return
    for case, *records in zip(cases, *by_rank):
        yield compare(case, precision, records, alone[case.model])


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """Markdown: what was found for every value of every axis, and for every pair of axes."""
    names = [name for name in PRECISIONS if any(v.precision == name for v in verdicts)]
    lines = [
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, torch {torch.__version__}, {STEPS} steps "
        "each. Cases (those that differ), and the largest relative difference of any loss, "
        "gradient norm or parameter:",
        "",
        "| axis | value | " + " | ".join(f"{name} cases | largest" for name in names) + " |",
        "|---|---|" + "---|---|" * len(names),
    ]
    for axis, options in AXES.items():
        for value in options:
            cells = [
                cell
                for name in names
                for cell in _counts(
                    [v for v in verdicts if v.precision == name and v.case.values[axis] == value]
                )
            ]
            lines.append(f"| {axis} | {value} | " + " | ".join(cells) + " |")
    short = {axis: axis.replace("optimizer_state", "state") for axis in AXES}
    lines += [
        "",
        "Pairs of values in which no case differs, of those that do not exclude each other:",
        "",
        "| | " + " | ".join(short[axis] for axis in list(AXES)[1:]) + " |",
        "|---|" + "---|" * (len(AXES) - 1),
    ]
    found = _pairs(verdicts)
    for at, row in enumerate(list(AXES)[:-1]):
        cells = ["" if to <= at else found[row, col] for to, col in enumerate(AXES) if to]
        lines.append(f"| {short[row]} | " + " | ".join(cells) + " |")
    return lines


def _counts(verdicts: Sequence[Verdict]) -> tuple[str, str]:
    wrong = sum(verdict.first is not None for verdict in verdicts)
    sizes = [
        difference.size
        for verdict in verdicts
        for difference in verdict.found
        if difference.is_relative and verdict.first is None
    ]
    count = f"{len(verdicts)} ({wrong})" if wrong else str(len(verdicts))
    return count, f"{max(sizes):.0e}" if sizes else "-"


def _pairs(verdicts: Sequence[Verdict]) -> dict[tuple[str, str], str]:
    """For each pair of axes how many pairs of values are equal, of how many."""
    result = {}
    for one, other in combinations(AXES, 2):
        wrong: dict[tuple[object, object], bool] = {}
        for verdict in verdicts:
            key = verdict.case.values[one], verdict.case.values[other]
            wrong[key] = wrong.get(key, False) or verdict.first is not None
        equal = len(wrong) - sum(wrong.values())
        result[one, other] = str(equal) if equal == len(wrong) else f"**{equal} of {len(wrong)}**"
    return result


def write(page: Path, lines: Sequence[str]) -> None:
    """Put `lines` between the marks of a page."""
    write_between(page, lines, MARKS, what="the matrix")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.laws.layouts.matrix", description=__doc__
    )
    add = parser.add_argument
    add("--case", type=Case.of, metavar="WORDS", help="one composition, by the words that name it")
    add(
        "--precision",
        nargs="+",
        choices=tuple(PRECISIONS),
        default=list(PRECISIONS),
        help="[all of them]",
    )
    add("--strength", type=int, help="values that are combined in every way [3 in fp64, else 2]")
    add("--write", action="store_true", help="keep the table in docs/parallelism.md")
    return parser


if __name__ == "__main__":
    main()
