"""Every mutant of `make test-mutants` still applies, and names a test that is there."""

import ast
import dataclasses
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT, write_tree
from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS, removed_checks

FEWEST = 120
FEWEST_OF_A_SUBJECT = 5
ALL = [mutant for mutants in MUTANTS.values() for mutant in mutants]


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file of tests, which many mutants name."""
    return ast.parse(path.read_text(encoding="utf-8"))


def problem_of(mutant: Mutant, root: Path) -> str | None:
    """Return why a mutant cannot be put in or cannot be caught; None when it can."""
    try:
        mutated = mutant.mutated(root)
        if mutant.file.endswith(".py"):
            ast.parse(mutated)
    except (LookupError, OSError, SyntaxError) as error:
        return f"{mutant.promise}: {error}"
    if mutated == (root / mutant.file).read_text(encoding="utf-8"):
        return f"{mutant.promise}: it changes nothing"
    file, *names = mutant.test.split("::")
    if not (root / file).is_file():
        return f"{mutant.promise}: no {file}"
    tree: ast.Module | ast.ClassDef | ast.FunctionDef = parsed(root / file)
    for name in names:
        wanted = name.partition("[")[0]
        found = [n for n in tree.body if getattr(n, "name", None) == wanted]
        if not found:
            return f"{mutant.promise}: no {wanted} in {file}"
        tree = found[0]
        if "[" in name and not (isinstance(tree, ast.FunctionDef) and tree.args.args):
            return f"{mutant.promise}: {wanted} in {file} takes no parameters"
    return None if names else f"{mutant.promise}: name one test of {file}"


def test_every_mutant_applies_and_names_a_test_that_is_there() -> None:
    problems = [problem for mutant in ALL if (problem := problem_of(mutant, ROOT))]
    assert problems == [], "\n".join(problems)


def test_there_are_as_many_as_were_promised() -> None:
    curated = len(ALL) - len(MUTANTS["list of checks"])
    assert curated >= FEWEST
    few = {
        subject: len(them) for subject, them in MUTANTS.items() if len(them) < FEWEST_OF_A_SUBJECT
    }
    assert few == {}
    twice = [name for name, times in Counter(mutant.promise for mutant in ALL).items() if times > 1]
    assert twice == []


def test_every_line_of_the_list_of_checks_has_a_mutant() -> None:
    listed = (ROOT / "megatron/preflight/checks.py").read_text(encoding="utf-8")
    # Indented too are the names of an import in several lines.
    lines = [
        line for line in listed.splitlines() if line.startswith("    ") and set(line) & {*".*"}
    ]
    assert len(removed_checks(ROOT)) == len(lines)


GOOD = Mutant("a is one", "m/a.py", "a = 1", "a = 2", "tests/test_a.py::TestA::test_a[1]")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"file": "m/b.py"}, "No such file"),
        ({"before": "a = 3"}, "has 0 times"),
        ({"before": " = "}, "has 2 times"),
        ({"after": "a ="}, "invalid syntax"),
        ({"after": "a = 1"}, "changes nothing"),
        ({"test": "tests/test_b.py::test_a"}, "no tests/test_b.py"),
        ({"test": "tests/test_a.py::test_a"}, "no test_a in"),
        ({"test": "tests/test_a.py"}, "name one test"),
        ({"test": "tests/test_a.py::test_alone[1]"}, "takes no parameters"),
    ],
)
def test_what_is_wrong_with_a_mutant_is_said(
    tmp_path: Path, changed: dict[str, str], problem: str | None
) -> None:
    test = "class TestA:\n    def test_a(self, x): ...\n\n\ndef test_alone(): ...\n"
    write_tree(tmp_path, {"m/a.py": "a = 1\nb = 2\n", "tests/test_a.py": test})
    found = problem_of(dataclasses.replace(GOOD, **changed), tmp_path)
    assert (found is None) if problem is None else (problem in str(found))
