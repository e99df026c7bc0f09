"""Imports point down, and nowhere in a circle."""

from pathlib import Path

import pytest

from tests.architecture.layers import LEVEL, cycles, models_in_loop, outsiders, violations
from tests.architecture.source_tree import MEGATRON, PROGRAM_FOLDERS, ROOT, write_tree


def test_no_import_points_up_or_sideways() -> None:
    found = list(violations(MEGATRON))
    assert not found, "\n".join(found)


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = cycles(MEGATRON)
    assert not found, "\n".join(" <-> ".join(group) for group in found)


@pytest.mark.parametrize("folder", PROGRAM_FOLDERS)
def test_no_programs_import_each_other_in_a_circle(folder: str) -> None:
    found = cycles(ROOT / folder)
    assert not found, "\n".join(" <-> ".join(group) for group in found)


def test_the_library_does_not_import_its_programs_or_tests() -> None:
    found = list(outsiders(MEGATRON))
    assert not found, "\n".join(found)


def test_the_loop_knows_no_kind_of_model(tmp_path: Path) -> None:
    found = list(models_in_loop(MEGATRON))
    assert not found, "\n".join(found)
    package = write_tree(
        tmp_path / "megatron",
        {
            "loop/a.py": "from megatron.model.specs import ModelBuild\n"
            "from megatron.data.loading.gpt_batch import shortened\n"
            "from megatron.model.accounting import flops_per_token\n",
            "training.py": "from megatron.data.loading.gpt_batch import shortened\n",
        },
    )
    assert [line.split(": ")[0] for line in models_in_loop(package)] == [
        "megatron/loop/a.py:2",
        "megatron/loop/a.py:3",
    ]


def test_every_part_of_the_library_is_in_a_layer() -> None:
    parts = {path.stem for path in MEGATRON.glob("*.py")} - {"__init__"}
    parts |= {path.parent.name for path in MEGATRON.glob("*/__init__.py")}
    assert parts <= set(LEVEL), parts - set(LEVEL)


def test_imports_up_and_sideways_are_found_wherever_they_hide(tmp_path: Path) -> None:
    package = write_tree(
        tmp_path / "megatron",
        {
            "__init__.py": "from megatron.training import pretrain\n",
            "model/gpt.py": "from megatron.optimizer import x\n"
            "from megatron.mpu.context import y\n"
            "def f():\n    from megatron.global_vars import get_args\n",
            "model/other.py": "from . import gpt\nfrom ..engine import base\n"
            "import importlib\nimportlib.import_module('megatron.loop.stop')\n",
            "optimizer/__init__.py": "",
            "mpu/__init__.py": "from megatron import errors, __version__\n",
            "errors.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    import megatron.config.run\n",
            "training.py": "from megatron import checkpointing, model\n",
            "helpers.py": "",
        },
    )
    found = sorted(violations(package))
    ups = (
        ("errors.py:3", "errors", "config"),
        ("model/gpt.py:1", "model", "optimizer"),
        ("model/gpt.py:4", "model", "global_vars"),
        ("model/other.py:2", "model", "engine"),
        ("model/other.py:4", "model", "loop"),
    )
    expected = [
        f"megatron/{place}: megatron.{inside} (layer {LEVEL[inside]}) may not import "
        f"megatron.{target} (layer {LEVEL[target]})"
        for place, inside, target in ups
    ]
    expected.append("megatron/helpers.py: megatron.helpers is in no layer; add it to LAYERS")
    assert found == sorted(expected)


def test_a_circle_inside_a_package_is_found(tmp_path: Path) -> None:
    package = write_tree(
        tmp_path / "megatron",
        {
            "__init__.py": "",
            "data/__init__.py": "",
            "data/a.py": "from megatron.data.b import x\n",
            "data/b.py": "def f():\n    from megatron.data import c\n",
            "data/c.py": "import megatron.data.a\n",
            "data/d.py": "from megatron.data import a\n",
        },
    )
    assert cycles(package) == [("megatron.data.a", "megatron.data.b", "megatron.data.c")]


def test_an_import_of_a_program_is_found(tmp_path: Path) -> None:
    package = write_tree(
        tmp_path / "megatron", {"log.py": "from tools.preprocessing.documents import find_inputs\n"}
    )
    assert list(outsiders(package)) == [
        "megatron/log.py:1: the library may not import tools.preprocessing.documents.find_inputs"
    ]
