"""No passage of the library or of the programs stands in them twice."""

import ast
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tests.architecture.source_tree import Source, everything, sources, write_tree

RUN_LINES = 12


class Line(NamedTuple):
    """A line that means something: where it is, and what is left of it without its indent."""

    file: str
    number: int
    text: str


def duplicate_runs(library: Sequence[Source], length: int = RUN_LINES) -> list[str]:
    """Pairs of places with `length` or more equal lines of code, the start of each pair."""
    places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    files = [meaningful_lines(source) for source in library]
    for at, lines in enumerate(files):
        for start in range(len(lines) - length + 1):
            window = tuple(line.text for line in lines[start : start + length])
            places[window].append((at, start))
    found = []
    for where in places.values():
        for one, other in pairwise(where):
            before = [(at, start - 1) for at, start in (one, other)]
            if not _same(files, before):  # otherwise the run began earlier and is reported there
                first, second = files[one[0]][one[1]], files[other[0]][other[1]]
                found.append(
                    f"{first.file}:{first.number} and {second.file}:{second.number} go on alike"
                )
    return found


def meaningful_lines(source: Source) -> list[Line]:
    """Lines of code without imports, docstrings, comments and blank lines."""
    passed_over: set[int] = set()
    for node in ast.walk(source.tree):
        value = node.value if isinstance(node, ast.Expr) else None
        # Not the ellipsis of a protocol, without which all of its lines would be alike.
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            passed_over.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return [
        Line(source.name, number, line.strip())
        for number, line in enumerate(source.text.splitlines(), start=1)
        if number not in passed_over and line.strip() and not line.strip().startswith("#")
    ]


def _same(files: Sequence[Sequence[Line]], where: Sequence[tuple[int, int]]) -> bool:
    if any(start < 0 for _, start in where):
        return False
    return len({files[at][start].text for at, start in where}) == 1


def test_no_passage_stands_in_the_code_twice() -> None:
    found = duplicate_runs(everything())
    assert not found, "\n".join(found)


def test_a_copied_passage_is_found_once_whatever_its_indent(tmp_path: Path) -> None:
    body = [f"x{number} = f({number})" for number in range(20)]
    copied = "\n".join(body)
    inside = "def g():\n" + "\n".join(f"    {line}  \n    # why" for line in body)
    tree = {"a.py": f"import os\n{copied}\ny = 1\n", "b.py": inside}
    library = sources(write_tree(tmp_path / "megatron", tree))
    assert duplicate_runs(library) == ["megatron/a.py:2 and megatron/b.py:2 go on alike"]
    assert duplicate_runs(library, length=21) == []


def test_docstrings_and_imports_may_be_alike(tmp_path: Path) -> None:
    text = '"""' + "\n".join("same words" for _ in range(20)) + '"""\n' + "import os\n" * 20
    library = sources(write_tree(tmp_path / "megatron", {"a.py": text, "b.py": text}))
    assert duplicate_runs(library) == []
