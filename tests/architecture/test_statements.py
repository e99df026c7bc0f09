"""Small statements with large consequences: asserts, bare excepts, characters."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.architecture.source_tree import MEGATRON, Source, programs, sources, write_tree

REASON = "# invariant:"


def unexplained_asserts(library: Sequence[Source]) -> Iterator[str]:
    """Asserts without the invariant of ours that they state; users get errors instead."""
    for source in library:
        lines = source.text.splitlines()
        for node in ast.walk(source.tree):
            is_assert = isinstance(node, ast.Assert) or (
                isinstance(node, ast.Raise) and "AssertionError" in ast.dump(node)
            )
            if is_assert:
                own = lines[node.lineno - 1 : node.end_lineno]
                if not any(REASON in line for line in own):
                    yield f"{source.name}:{node.lineno}: an assert needs `{REASON} why`"


def swallowing_excepts(library: Sequence[Source]) -> Iterator[str]:
    """`except:` of everything, and `except Exception: pass`."""
    for source in library:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = isinstance(node.type, ast.Name) and node.type.id in (
                "Exception",
                "BaseException",
            )
            if node.type is None or (broad and all(isinstance(n, ast.Pass) for n in node.body)):
                yield f"{source.name}:{node.lineno}: name the exceptions that are meant"


def not_ascii(library: Sequence[Source]) -> Iterator[str]:
    """Lines of code with characters that a terminal may show as something else."""
    for source in library:
        for number, line in enumerate(source.text.splitlines(), start=1):
            if not line.isascii():
                yield f"{source.name}:{number}: {line.strip()!a}"


def test_every_assert_says_which_invariant_it_states() -> None:
    found = list(unexplained_asserts([*sources(MEGATRON), *programs()]))
    assert not found, "\n".join(found)


def test_no_except_swallows_everything() -> None:
    found = list(swallowing_excepts([*sources(MEGATRON), *programs()]))
    assert not found, "\n".join(found)


def test_code_is_ascii() -> None:
    found = list(not_ascii([*sources(MEGATRON), *programs()]))
    assert not found, "\n".join(found)


def test_careless_statements_are_found(tmp_path: Path) -> None:
    text = (
        "def f(x):\n"
        "    assert x\n"
        "    assert x  # invariant: callers know\n"
        "    raise AssertionError(x)\n"
        "try:\n    f(1)\nexcept:\n    f(2)\n"
        "try:\n    f(1)\nexcept Exception:\n    pass\n"
        "try:\n    f(1)\nexcept ValueError:\n    pass\n"
        "y = '\u00e4'\n"
    )
    found = sources(write_tree(tmp_path / "megatron", {"a.py": text}))
    assert [line.split(":")[1] for line in unexplained_asserts(found)] == ["2", "4"]
    assert [line.split(":")[1] for line in swallowing_excepts(found)] == ["7", "11"]
    assert [line.split(":")[1] for line in not_ascii(found)] == ["17"]
