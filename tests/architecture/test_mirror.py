"""Every module has a docstring, and a test in the mirrored place."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source_tree import (
    MEGATRON,
    PROGRAM_FOLDERS,
    ROOT,
    Source,
    everything,
    sources,
    write_tree,
)

REFUSED_WORDS = frozenset({"utils", "util", "helpers", "helper", "common", "misc", "shared"})
CODE_FOLDERS = ("megatron", *PROGRAM_FOLDERS)
TEST_ROOTS = ("tests/unit", "tests/distributed")
LONGEST_DOCSTRING_LINES = 8


def without_docstring(package: Path) -> Iterator[str]:
    """Modules that do not open with a sentence about what they own, and ones that are too long."""
    for source in sources(package):
        text = ast.get_docstring(source.tree)
        if not text or text.strip().rstrip(".").isidentifier():
            yield f"{source.name}: say in its docstring what it owns"
        elif len(text.splitlines()) > LONGEST_DOCSTRING_LINES:
            yield f"{source.name}: the docstring has {len(text.splitlines())} lines; keep 1 to 4"


def without_sentence(package: Path) -> Iterator[str]:
    """Public functions and classes of a module that have no docstring.

    Methods are not looked at: one that implements a protocol is described there.
    """
    for source in sources(package):
        for node in source.tree.body:
            named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if named and not node.name.startswith("_") and not ast.get_docstring(node):
                yield f"{source.name}:{node.lineno}: {node.name} has no docstring"


def without_test(package: Path, root: Path) -> Iterator[str]:
    """Modules for which no test file of the same path and name exists."""
    for source in sources(package):
        expected = mirrors(source)
        if expected and not any((root / path).is_file() for path in expected):
            yield f"{source.name}: no test at {' or '.join(expected)}"


def mirrors(source: Source) -> list[str]:
    """Where a module's tests may be; nowhere for a package that only has a docstring."""
    inside = Path(source.name).relative_to("megatron")
    if inside.name != "__init__.py":
        return [f"{top}/{inside.parent / f'test_{inside.name}'}" for top in TEST_ROOTS]
    defines = any(isinstance(n, ast.FunctionDef | ast.ClassDef) for n in source.tree.body)
    if not defines:
        return []
    names = ["test_init.py", *([f"test_{inside.parent.name}.py"] if inside.parent.name else [])]
    return [f"{top}/{inside.parent / name}" for top in TEST_ROOTS for name in names]


@pytest.mark.parametrize("folder", CODE_FOLDERS)
def test_every_module_says_what_it_owns(folder: str) -> None:
    found = list(without_docstring(ROOT / folder))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", CODE_FOLDERS)
def test_every_public_name_has_a_sentence(folder: str) -> None:
    found = list(without_sentence(ROOT / folder))
    assert not found, "\n".join(found)


def test_every_module_has_a_test_of_the_same_name() -> None:
    found = list(without_test(MEGATRON, ROOT))
    assert not found, "\n".join(found)


def test_no_module_is_a_drawer_for_anything() -> None:
    found = [
        source.name for source in everything() if REFUSED_WORDS & set(source.module.split("."))
    ]
    assert not found, f"name what it owns instead: {', '.join(found)}"


def test_every_tests_folder_is_a_package() -> None:
    # Test files of different folders share their names; without packages pytest mixes them up.
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    missing = sorted(str(folder) for folder in folders if not (folder / "__init__.py").exists())
    assert not missing, missing


def test_missing_docstrings_and_tests_are_found(tmp_path: Path) -> None:
    code = '"""It owns a thing."""\n\n\ndef public() -> None:\n    pass\n'
    package = write_tree(
        tmp_path / "megatron",
        {
            "__init__.py": '"""It only has a docstring."""\n',
            "data/__init__.py": '"""data."""\n\n\ndef f() -> None:\n    """It is tested."""\n',
            "data/a.py": "x = 1\n",
            "data/b.py": code,
        },
    )
    write_tree(tmp_path / "tests", {"distributed/data/test_a.py": ""})
    assert list(without_docstring(package)) == [
        "megatron/data/__init__.py: say in its docstring what it owns",
        "megatron/data/a.py: say in its docstring what it owns",
    ]
    assert list(without_sentence(package)) == ["megatron/data/b.py:4: public has no docstring"]
    assert [line.partition(":")[0] for line in without_test(package, tmp_path)] == [
        "megatron/data/__init__.py",
        "megatron/data/b.py",
    ]
