"""The registry of assumptions is complete, and what it claims is in the code and in the tests."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.architecture.source_tree import ROOT, write_tree
from tools.docs.assumptions import Assumption, State, page, read_registry

LAST_IDS = {"M": 13, "L": 10, "N": 13, "A": 10, "X": 18}
IDS = [f"{letter}{number}" for letter, last in LAST_IDS.items() for number in range(1, last + 1)]


def claim_problems(registry: Mapping[str, Assumption]) -> Iterator[str]:
    """Entries that are missing or unknown, and those that claim a check without naming a test."""
    for name in IDS:
        if name not in registry:
            yield f"{name} is missing"
    for name, one in registry.items():
        if name not in IDS:
            yield f"{name} is no assumption"
        if not one.assumption.strip():
            yield f"{name} does not say what is assumed"
        if not one.statement.strip():
            yield f"{name} has no statement"
        if one.state is not State.NOT_YET and not one.tests:
            yield f"{name} is {one.state}, and no test breaks it"


def missing_names(registry: Mapping[str, Assumption], root: Path = ROOT) -> Iterator[str]:
    """Checks and tests that entries name and that do not exist."""
    for name, one in registry.items():
        for separator, references in ((":", one.checks), ("::", one.tests)):
            for reference in references:
                path, found, inside = reference.partition(separator)
                if not found or inside not in defined_names(root / path):
                    yield f"{name}: {reference}"


@cache
def defined_names(path: Path) -> frozenset[str]:
    """Return the functions and classes of a file, methods included; none where it is not there."""
    if not path.is_file():
        return frozenset()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def entry(state: State, *, statement: str = "so", **names: tuple[str, ...]) -> Assumption:
    return Assumption(assumption="a", state=state, statement=statement, **names)


def test_every_assumption_is_in_the_registry_with_what_it_claims() -> None:
    found = list(claim_problems(read_registry()))
    assert not found, "\n".join(found)


def test_checks_and_tests_of_the_registry_exist() -> None:
    found = list(missing_names(read_registry()))
    assert not found, "\n".join(found)


def test_a_claim_without_a_test_or_a_statement_is_found() -> None:
    whole = {name: entry(State.NOT_YET) for name in IDS}
    tested = entry(State.HELD, tests=("tests/test_a.py::test_b",))
    assert list(claim_problems(whole | {"M1": tested})) == []
    for state in (State.HELD, State.PARTLY):
        found = list(claim_problems(whole | {"M1": entry(state)}))
        assert found == [f"M1 is {state}, and no test breaks it"]
    found = list(claim_problems(whole | {"L3": entry(State.NOT_YET, statement=" ")}))
    assert found == ["L3 has no statement"]


def test_a_missing_or_unknown_id_is_found() -> None:
    whole = {name: entry(State.NOT_YET) for name in IDS if name != "X18"}
    whole["M14"] = entry(State.NOT_YET)
    assert list(claim_problems(whole)) == ["X18 is missing", "M14 is no assumption"]


@pytest.mark.parametrize(
    ("names", "is_there"),
    [
        ({"checks": ("a/b.py:check",)}, True),
        ({"checks": ("a/b.py:Gate",)}, True),
        ({"checks": ("a/b.py:gone",)}, False),
        ({"checks": ("a/gone.py:check",)}, False),
        ({"checks": ("a/b.py",)}, False),
        ({"tests": ("a/b.py::test_it",)}, True),
        ({"tests": ("a/b.py::test_gone",)}, False),
        ({"tests": ("a/b.py:test_it",)}, False),
    ],
)
def test_a_name_that_leads_nowhere_is_found(
    tmp_path: Path, names: dict[str, tuple[str, ...]], is_there: bool
) -> None:
    text = "def check(): ...\nclass Gate:\n    def test_it(self): ...\n"
    root = write_tree(tmp_path, {"a/b.py": text})
    found = list(missing_names({"M1": entry(State.HELD, **names)}, root))
    assert (found == []) is is_there


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[M1]\nassumption = "a"\nstate = "done"\nstatement = "s"\n', "'done' is not a valid"),
        ('[M1]\nassumption = "a"\nstatement = "s"\n', "'state'"),
        ('[M1]\nassumption = "a"\nstate = "held"\nstatement = "s"\ntest = []\n', "'test'"),
    ],
)
def test_an_entry_that_cannot_be_read_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = write_tree(tmp_path, {"a.toml": text}) / "a.toml"
    with pytest.raises(ConfigError, match="registry of assumptions") as error:
        read_registry(path)
    assert "[M1]" in str(error.value)
    assert words in str(error.value)


def test_a_section_names_tests_as_sentences_below_their_file() -> None:
    tests = ("tests/a/test_b.py::test_it_breaks", "tests/a/test_b.py::test_it_is_found")
    text = page({"M1": entry(State.HELD, checks=("megatron/a.py:check",), tests=tests)})
    assert "\n1 assumptions: 1 held, 0 partly, 0 not yet.\n" in text
    assert "| [M1](#m1) | a | held |" in text
    assert "Checked by `check` in [a.py](../megatron/a.py)." in text
    assert "- [test_b.py](../tests/a/test_b.py): it breaks; it is found\n" in text
