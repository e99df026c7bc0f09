"""How large everything is: printed after the gates for the reviewer's eye, and never failing."""

import ast
from collections import Counter
from pathlib import Path

from tests.architecture.source_tree import sources

FILE_LINES = 500
FUNCTION_LINES = 60
PARAMETERS = 7


def size_report(package: Path) -> list[str]:
    """Lines per package, then what is larger than the guides of CONTRIBUTING.md."""
    per_part: Counter[str] = Counter()
    large: list[str] = []
    for source in sources(package):
        lines = len(source.text.splitlines())
        inside = Path(source.name).relative_to(package.name).parts
        per_part[inside[0] if len(inside) > 1 else "(top)"] += lines
        if lines > FILE_LINES:
            large.append(f"{source.name}: {lines} lines (guide {FILE_LINES})")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                large += _large_function(source.name, node)
    parts = ", ".join(f"{name} {lines}" for name, lines in sorted(per_part.items()))
    return [f"{package.name}/: {per_part.total()} lines ({parts})", *large]


def _large_function(file: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    found = []
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    arguments = node.args
    count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    count -= bool(arguments.args) and arguments.args[0].arg in ("self", "cls")
    if lines > FUNCTION_LINES:
        found.append(
            f"{file}:{node.lineno}: {node.name} has {lines} lines (guide {FUNCTION_LINES})"
        )
    if count > PARAMETERS:
        found.append(
            f"{file}:{node.lineno}: {node.name} has {count} parameters (guide {PARAMETERS})"
        )
    return found
