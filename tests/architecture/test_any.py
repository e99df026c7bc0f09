"""`Any` switches the type checker off: the library does not use more of it than it does."""

import ast
from collections.abc import Sequence
from pathlib import Path

from tests.architecture.source_tree import MEGATRON, Source, sources, write_tree

# Lines with `Any` in 1,000 lines of code. Most of them are for values without types: the content of
# unpickled files, and objects of DeepSpeed and of packages without annotations.
MOST_ANY_PER_1000 = 5.0


def lines_with_any(source: Source) -> list[int]:
    """Return the numbers of the lines that use `Any`, in code or in a quoted annotation."""
    found = set()
    for node in ast.walk(source.tree):
        match node:
            case ast.Name(id="Any") | ast.Attribute(attr="Any"):
                found.add(node.lineno)
            case ast.arg() | ast.AnnAssign() if _is_quoted_any(node.annotation):
                found.add(node.lineno)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if _is_quoted_any(node.returns):
                found.add(node.lineno)
    return sorted(found)


def any_per_1000(library: Sequence[Source]) -> float:
    """Return how many lines in 1,000 use `Any`."""
    lines = sum(len(source.text.splitlines()) for source in library)
    return 1000 * sum(len(lines_with_any(source)) for source in library) / lines


def _is_quoted_any(annotation: ast.expr | None) -> bool:
    if not isinstance(annotation, ast.Constant) or not isinstance(annotation.value, str):
        return False
    quoted = ast.walk(ast.parse(annotation.value))
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in quoted)


def test_any_does_not_become_more() -> None:
    assert any_per_1000(sources(MEGATRON)) <= MOST_ANY_PER_1000


def test_every_use_of_any_is_counted_once_a_line(tmp_path: Path) -> None:
    text = (
        "import typing\n"
        "from typing import Any\n"
        "\n"
        "# Any comment\n"
        "def f(a: Any, b: Any) -> list[Any]: ...\n"
        "def g(a: 'dict[str, Any]') -> 'Any': ...\n"
        "x: typing.Any = 'Any'\n"
        "y: 'Any' = 0\n"
    )
    (source,) = sources(write_tree(tmp_path / "megatron", {"a.py": text}))
    assert lines_with_any(source) == [5, 6, 7, 8]
    assert any_per_1000([source]) == 500
