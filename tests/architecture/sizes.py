"""How large everything is: printed after the gates for the reviewer's eye.

Only `wide_functions` is a gate of its own.
"""

import ast
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.architecture.source_tree import Source, sources

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


def wide_functions(code: Sequence[Source], most: int) -> list[str]:
    """Return the functions of more than `most` parameters, without those of `self` and `cls`."""
    return [
        f"{source.name}: {node.name} has {parameters(node)} parameters"
        for source in code
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and parameters(node) > most
    ]


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of parameters that a caller may give."""
    positional = [*node.args.posonlyargs, *node.args.args]
    is_bound = bool(positional) and positional[0].arg in ("self", "cls")
    return len(positional) + len(node.args.kwonlyargs) - is_bound


def _large_function(file: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    found = []
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    count = parameters(node)
    if lines > FUNCTION_LINES:
        found.append(
            f"{file}:{node.lineno}: {node.name} has {lines} lines (guide {FUNCTION_LINES})"
        )
    if count > PARAMETERS:
        found.append(
            f"{file}:{node.lineno}: {node.name} has {count} parameters (guide {PARAMETERS})"
        )
    return found
