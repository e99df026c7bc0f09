"""Two public classes do not share a name: a name in a message or a page is unambiguous."""

import ast
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.architecture.source_tree import MEGATRON, ROOT, Source, sources, write_tree

SHARED_NAMES: frozenset[str] = (
    frozenset()
)  # classes that may share a name, with a reason beside each


def shared_class_names(code: Sequence[Source]) -> list[str]:
    """Return the names of public classes that several modules define, with the modules."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for source in code:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(source.name)
    return [
        f"{name}: {', '.join(files)}"
        for name, files in sorted(homes.items())
        if len(files) > 1 and name not in SHARED_NAMES
    ]


def test_no_two_public_classes_share_a_name() -> None:
    code = [*sources(MEGATRON), *sources(ROOT / "tools"), *sources(ROOT / "tasks")]
    assert shared_class_names(code) == []


def test_a_name_of_two_classes_is_found(tmp_path: Path) -> None:
    tree = {"a.py": "class Part:\n    pass\n", "b.py": "class Part: ...\nclass _Own: ...\n"}
    library = sources(write_tree(tmp_path / "megatron", tree | {"c.py": "class _Own: ...\n"}))
    assert shared_class_names(library) == ["Part: megatron/a.py, megatron/b.py"]
