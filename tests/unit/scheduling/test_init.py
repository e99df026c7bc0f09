"""Tests of megatron.scheduling as a whole."""

from pathlib import Path

import pytest

import megatron.scheduling
from tests.architecture.source_tree import MEGATRON, Source, imports, sources, write_tree

# What would let a rank decide something that the others do not know.
IMPURE = {"time", "datetime", "random", "secrets", "os", "socket", "asyncio", "threading", "uuid"}


def impure_imports(code: list[Source]) -> list[str]:
    return [
        f"{source.name}:{line}: {name}"
        for source in code
        for line, name in imports(source)
        if name.partition(".")[0] in IMPURE
    ]


def test_nothing_in_it_reads_a_clock_a_random_number_or_the_network() -> None:
    assert megatron.scheduling.__doc__
    code = [one for one in sources(MEGATRON) if one.module.startswith("megatron.scheduling")]
    assert len(code) > 5
    assert impure_imports(code) == []


@pytest.mark.parametrize("line", ["import time", "from datetime import datetime", "import os.path"])
def test_a_clock_would_be_found(tmp_path: Path, line: str) -> None:
    code = sources(write_tree(tmp_path / "megatron", {"a.py": line}))
    assert len(impure_imports(code)) == 1
