"""Python sources as syntax trees: what every gate in this folder reads.

Nothing is imported or run, so a gate also sees code that only some machine would reach.
"""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEGATRON = ROOT / "megatron"
PROGRAM_FOLDERS = ("tools", "tasks", "benchmarks", "examples")


@dataclass(frozen=True)
class Source:
    """One Python file; `name` is its path from the folder above the one that was searched."""

    path: Path
    name: str

    @cached_property
    def text(self) -> str:
        """What stands in it."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return _parsed(self.text, self.name)

    @cached_property
    def module(self) -> str:
        """Its dotted name; a package's `__init__.py` has the package's."""
        dotted = self.name.removesuffix(".py").replace("/", ".")
        return dotted.removesuffix(".__init__")


def sources(folder: Path) -> list[Source]:
    """Every Python file below `folder`, in order."""
    found = sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)
    return [Source(path, path.relative_to(folder.parent).as_posix()) for path in found]


def programs(root: Path = ROOT) -> list[Source]:
    """What users start: the entry points at the top, and everything in tools/ and its like."""
    top = [Source(path, path.name) for path in sorted(root.glob("*.py"))]
    return top + [one for folder in PROGRAM_FOLDERS for one in sources(root / folder)]


def everything(root: Path = ROOT) -> list[Source]:
    """Return the library and what users start: all code that is not a test."""
    return sources(root / "megatron") + programs(root)


def write_tree(folder: Path, files: dict[str, str]) -> Path:
    """Write `files` (path: text) below `folder`, for a gate to be tried on; returns `folder`."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, wherever in the file it does so.

    `from a import b` gives `a.b`: whether b is a module or a name in it, cannot be seen from here.
    Relative imports are made absolute; `import_module("a.b")` with a literal counts.
    """
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            literal = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, str(name)) for name in literal)


def aliases(source: Source) -> dict[str, str]:
    """What the names that a file imports stand for: `dist` for `torch.distributed`."""
    names: dict[str, str] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            for alias in node.names:
                names[alias.asname or alias.name] = f"{base}.{alias.name}"
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    """The full name that an expression like `dist.all_reduce` stands for; None for others."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, names)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


@functools.cache
def _parsed(text: str, name: str) -> ast.Module:
    return ast.parse(text, filename=name)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = source.module.split(".")
    if not source.name.endswith("__init__.py"):
        parts = parts[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
