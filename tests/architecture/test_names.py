"""A name in a message or a page is unambiguous: two public classes do not share one.

Functions of several modules may share a short verb (`manifest.load`, `unpickle.load`) where callers
write the module in front of it.
"""

import ast
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.architecture.source_tree import MEGATRON, ROOT, Source, sources, write_tree

# Classes that may share a name, with a reason beside each.
SHARED_NAMES: frozenset[str] = frozenset()
PROGRAMS = ("tools", "tasks")


def homes(
    code: Sequence[Source], kind: type[ast.ClassDef | ast.FunctionDef]
) -> dict[str, list[Source]]:
    """Return the modules that define each public class or function, by its name."""
    found: defaultdict[str, list[Source]] = defaultdict(list)
    for source in code:
        for node in source.tree.body:
            if isinstance(node, kind) and not node.name.startswith("_"):
                found[node.name].append(source)
    return found


def shared_class_names(code: Sequence[Source]) -> list[str]:
    """Return the names of public classes that several modules define, with the modules."""
    return [
        f"{name}: {', '.join(module.name for module in modules)}"
        for name, modules in sorted(homes(code, ast.ClassDef).items())
        if len(modules) > 1 and name not in SHARED_NAMES
    ]


def bare_imports_of_shared_functions(code: Sequence[Source]) -> list[str]:
    """Return the imports of a function without its module whose name several modules define."""
    functions = {
        name: {module.module for module in modules}
        for name, modules in homes(code, ast.FunctionDef).items()
    }
    return [
        f"{source.name}:{node.lineno}: {alias.name} of {node.module}, which also stands in "
        + ", ".join(sorted(functions[alias.name] - {node.module}))
        for source in code
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if len(functions.get(alias.name, ())) > 1 and node.module in functions[alias.name]
    ]


def library_and_programs() -> list[Source]:
    """Return every module whose names a message or a page may mention."""
    return [*sources(MEGATRON), *(one for name in PROGRAMS for one in sources(ROOT / name))]


def test_no_two_public_classes_share_a_name() -> None:
    assert shared_class_names(library_and_programs()) == []


def test_functions_that_share_a_name_are_called_with_their_module() -> None:
    assert bare_imports_of_shared_functions(library_and_programs()) == []


def test_a_name_of_two_classes_is_found(tmp_path: Path) -> None:
    tree = {"a.py": "class Part:\n    pass\n", "b.py": "class Part: ...\nclass _Own: ...\n"}
    library = sources(write_tree(tmp_path / "megatron", tree | {"c.py": "class _Own: ...\n"}))
    assert shared_class_names(library) == ["Part: megatron/a.py, megatron/b.py"]


def test_a_bare_import_of_a_name_of_two_functions_is_found(tmp_path: Path) -> None:
    tree = {
        "a.py": "def load(): ...\ndef only(): ...\n",
        "b.py": "def load(): ...\n",
        "c.py": "from megatron import a\nfrom megatron.a import load, only\n",
    }
    library = sources(write_tree(tmp_path / "megatron", tree))
    (found,) = bare_imports_of_shared_functions(library)
    assert found == "megatron/c.py:2: load of megatron.a, which also stands in megatron.b"
