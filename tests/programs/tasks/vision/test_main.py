"""The vision tasks from any folder, as other Megatrons start them."""

import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tasks.vision import main as vision
from tests.support.launch import ROOT, run_program

MAIN = str(ROOT / "tasks" / "vision" / "main.py")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("words", [[MAIN], ["-m", "tasks.vision.main"]])
def test_it_starts_from_any_folder(words: list[str], tmp_path: Path) -> None:
    environment = {} if words == [MAIN] else {"PYTHONPATH": str(ROOT)}
    flags = ["--task", "classify", "--help"]
    ended = run_program([sys.executable, *words, *flags], cwd=tmp_path, environment=environment)
    assert ended.status == 0, ended.text
    assert "--epochs" in ended.out


def test_another_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no such vision task"):
        vision.main(["--task", "segment"])
