"""State of the whole process has two homes, and is read only at the edge of the library."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.architecture.source_tree import MEGATRON, Source, imports, sources, write_tree

GLOBAL_STATEMENT_HOMES = ("megatron/global_vars.py", "megatron/mpu/initialize.py")
FACADES = (
    "megatron.global_vars",
    "megatron.mpu.initialize",
    "megatron.get_args",
    "megatron.get_timers",
    "megatron.get_tokenizer",
    "megatron.mpu.get_",
    "megatron.mpu",  # `from megatron import mpu` is Megatron's way to the same facade
)
EDGE = (
    "megatron/global_vars.py",
    "megatron/initialize.py",
    "megatron/checkpointing.py",
    "megatron/training.py",
    "megatron/trained_model.py",
    "megatron/mpu/__init__.py",  # hands the familiar names on to user programs
)


def global_statements(library: Sequence[Source]) -> Iterator[str]:
    """Every `global` statement outside of its two homes."""
    for source in library:
        if source.name in GLOBAL_STATEMENT_HOMES:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Global):
                yield f"{source.name}:{node.lineno}: global {', '.join(node.names)}"


def facade_readers(library: Sequence[Source]) -> Iterator[str]:
    """Every import of process-wide state below the edge."""
    for source in library:
        if source.name in EDGE:
            continue
        for line, name in imports(source):
            if _is_facade(name):
                yield f"{source.name}:{line}: {name} is for programs; take it as an argument"


def _is_facade(name: str) -> bool:
    for facade in FACADES:
        if name == facade or (facade.endswith("_") and name.startswith(facade)):
            return True
        if facade.count(".") == 2 - facade.endswith("global_vars") and name.startswith(
            f"{facade}."
        ):
            return True
    return False


def test_only_two_modules_rebind_their_globals() -> None:
    found = list(global_statements(sources(MEGATRON)))
    assert not found, "\n".join(found)


def test_the_facade_is_read_only_at_the_edge() -> None:
    found = list(facade_readers(sources(MEGATRON)))
    assert not found, "\n".join(found)


def test_a_global_statement_elsewhere_is_found(tmp_path: Path) -> None:
    text = "_x = 0\ndef f():\n    global _x\n    _x = 1\n"
    package = write_tree(tmp_path / "megatron", {"log.py": text, "global_vars.py": text})
    assert list(global_statements(sources(package))) == ["megatron/log.py:3: global _x"]


def test_a_read_of_the_facade_below_the_edge_is_found(tmp_path: Path) -> None:
    package = write_tree(
        tmp_path / "megatron",
        {
            "model/a.py": "from megatron import get_args\n",
            "model/b.py": "from megatron import mpu\n",
            "model/c.py": "def f():\n    from megatron.global_vars import get_timers\n",
            "model/d.py": "from megatron.mpu.initialize import get_data_parallel_group\n",
            "model/e.py": "from megatron.mpu import get_data_parallel_rank\n",
            "model/fine.py": "from megatron.mpu.context import Group\nimport megatron.mpu.layers\n"
            "from megatron.mpu import partition\n",
            "training.py": "from megatron.global_vars import Runtime\n",
        },
    )
    found = list(facade_readers(sources(package)))
    assert [line.partition(":")[0] for line in found] == [
        f"megatron/model/{name}.py" for name in "abcde"
    ]
