"""The tree that docs/architecture.md draws is the tree, and no folder is too full to be read."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.architecture.source_tree import ROOT, write_tree
from tools.other_programs.table import PROGRAMS

DRAWN_FOLDERS = ("megatron", "tools", "tasks", "benchmarks")
MIRRORS = {
    "tests/unit": "megatron",
    "tests/distributed": "megatron",
    "tests/programs/tools": "tools",
    "tests/programs/tasks": "tasks",
    "tests/programs/benchmarks": "benchmarks",
}
MOST_MODULES = 22  # a reader sees a folder of so many at a glance


def drawn_paths(text: str) -> set[str]:
    """Return the paths in the first code block below "## The tree"; folders end with a slash."""
    block = re.search(r"^## The tree$.*?^```$(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert block is not None, "no tree is drawn"
    found: set[str] = set()
    above: dict[int, str] = {}
    for line in filter(None, block[1].splitlines()):
        indent = len(line) - len(line.lstrip())
        parent = above.get(indent - 2, "") if indent else ""
        for name in re.split(r"\s{2,}", line.strip())[0].split():
            found.add(parent + name)
            if name.endswith("/"):
                above[indent] = parent + name
    return found


def packages(root: Path, folder: str) -> set[str]:
    """Return the folders at and below `folder` that hold Python modules, as paths with a slash."""
    modules = (path for path in (root / folder).rglob("*.py") if "__pycache__" not in path.parts)
    return {f"{path.parent.relative_to(root).as_posix()}/" for path in modules}


def tree_differences(text: str, root: Path, folders: Iterable[str] = DRAWN_FOLDERS) -> list[str]:
    """Return every package and top module that is drawn or there, but not both."""
    there = set().union(*(packages(root, folder) for folder in folders))
    there |= {f"megatron/{path.name}" for path in (root / "megatron").glob("*.py")}
    there.discard("megatron/__init__.py")
    drawn = {path for path in drawn_paths(text) if path.startswith(tuple(folders))}
    missing = [f"{path} is not drawn" for path in sorted(there - drawn)]
    return missing + [f"{path} is drawn and not there" for path in sorted(drawn - there)]


def full_folders(root: Path, folders: Iterable[str] = (*DRAWN_FOLDERS, "tests")) -> list[str]:
    """Return the folders that hold more than `MOST_MODULES` modules.

    Paths of other Megatrons do not count: they are lines of one table.
    """
    counts = Counter(
        path.parent.relative_to(root).as_posix()
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if path.name != "__init__.py" and path.relative_to(root).as_posix() not in PROGRAMS
    )
    return [f"{name}: {n} modules" for name, n in sorted(counts.items()) if n > MOST_MODULES]


def strangers_in_mirrors(root: Path) -> list[str]:
    """Return the folders of tests that mirror no folder of what they test."""
    return [
        f"{path} mirrors no folder of {original}/"
        for mirror, original in MIRRORS.items()
        for path in sorted(packages(root, mirror))
        if not (root / path.replace(mirror, original, 1)).is_dir()
        and not path.startswith("tests/distributed/support/")  # the runner of ranks itself
    ]


def test_the_tree_of_the_architecture_page_is_the_tree() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert tree_differences(text, ROOT) == []


def test_no_folder_holds_more_modules_than_a_reader_can_take_in() -> None:
    assert full_folders(ROOT) == []


def test_folders_of_tests_mirror_what_they_test() -> None:
    assert strangers_in_mirrors(ROOT) == []


def test_what_is_drawn_wrongly_is_found(tmp_path: Path) -> None:
    many = {f"data/m{number}.py": "" for number in range(MOST_MODULES + 1)}
    write_tree(tmp_path / "megatron", {"log.py": "", "mpu/inner/a.py": "", **many})
    write_tree(tmp_path / "tests", {"unit/gone/test_a.py": ""})
    drawing = "megatron/   x\n  log.py old.py\n  data/ loop/   y\n    maps/   z"
    text = f"## The tree\n\n```\n{drawing}\n```\n"
    assert tree_differences(text, tmp_path, ["megatron"]) == [
        "megatron/mpu/inner/ is not drawn",
        "megatron/loop/ is drawn and not there",
        "megatron/loop/maps/ is drawn and not there",
        "megatron/old.py is drawn and not there",
    ]
    assert full_folders(tmp_path) == [f"megatron/data: {MOST_MODULES + 1} modules"]
    assert strangers_in_mirrors(tmp_path) == ["tests/unit/gone/ mirrors no folder of megatron/"]
