"""A program imports what it needs, when it needs it: each import costs every rank its seconds.

Flags are read and refused without torch, and a run of the native engine starts without DeepSpeed.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source_tree import MEGATRON, ROOT, imports, sources, write_tree

HEAVY = ("torch", "numpy")
OPTIONAL = ("deepspeed", "transformers", "tensorboard", "matplotlib")
LIGHT_MODULES = (
    "megatron",
    "megatron.config.run",
    "megatron.arguments",
    "megatron.program",
    "megatron.command",
)


def heavy_imports(package: Path) -> Iterator[str]:
    """Imports of torch or numpy in config/, in what config/ may import, and in scheduling/."""
    for source in sources(package):
        name = source.name.removeprefix("megatron/")
        is_light = name.startswith(("config/", "scheduling/"))
        if is_light or name in ("errors.py", "log.py", "arguments.py"):
            for line, target in imports(source):
                if target.partition(".")[0] in HEAVY:
                    yield f"{source.name}:{line}: {target}"


def imported_by(*command: str) -> set[str]:
    """The top-level packages that a Python command imports, as Python itself reports them."""
    run = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    modules = re.findall(r"^import time:.*\|\s*(\S+)$", run.stderr, flags=re.MULTILINE)
    return {module.partition(".")[0] for module in modules}


def test_config_command_line_and_scheduling_name_no_heavy_module() -> None:
    found = list(heavy_imports(MEGATRON))
    assert not found, "\n".join(found)


def test_help_starts_no_torch() -> None:
    packages = imported_by("pretrain_gpt.py", "--help")
    assert "megatron" in packages
    assert not packages & set(HEAVY)


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_what_reads_flags_starts_no_torch(module: str) -> None:
    assert not imported_by("-c", f"import {module}") & set(HEAVY)


def test_training_imports_what_a_flag_asks_for_when_it_is_asked_for() -> None:
    assert not imported_by("-c", "import megatron.training, tasks.main") & set(OPTIONAL)


def test_the_probe_sees_a_heavy_import(tmp_path: Path) -> None:
    write_tree(tmp_path, {"numpy.py": "", "program.py": "def f():\n    import numpy\nf()\n"})
    assert "numpy" in imported_by(str(tmp_path / "program.py"))


def test_a_heavy_import_in_config_is_found(tmp_path: Path) -> None:
    text = "def f():\n    from torch import nn\n"
    package = write_tree(tmp_path / "megatron", {"config/model.py": text, "log.py": "import math"})
    found = list(heavy_imports(package))
    assert len(found) == 1
    assert found[0].endswith("config/model.py:2: torch.nn")
