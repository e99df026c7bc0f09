"""The dispatcher: from any folder, by any way of starting it, with words for every mistake."""

import sys
from pathlib import Path

import pytest

import megatron
from megatron.errors import ConfigError
from tasks import main as dispatcher
from tasks import registry
from tests.support.launch import ROOT, run_program

MAIN = str(ROOT / "tasks" / "main.py")


@pytest.mark.parametrize("words", [[MAIN], ["-m", "tasks.main"]])
def test_it_starts_from_any_folder(words: list[str], tmp_path: Path) -> None:
    environment = {} if words == [MAIN] else {"PYTHONPATH": str(ROOT)}
    ended = run_program([sys.executable, *words, "--help"], cwd=tmp_path, environment=environment)
    assert ended.status == 0, ended.text
    assert all(name in ended.out for name in registry.TASKS)


def test_a_package_of_the_same_name_is_noticed(tmp_path: Path) -> None:
    stranger = tmp_path / "megatron"
    stranger.mkdir()
    with pytest.raises(ConfigError, match="another package called megatron is imported"):
        dispatcher.check_tree(str(stranger / "__init__.py"), dispatcher.HERE)
    dispatcher.check_tree(megatron.__file__, dispatcher.HERE)


def test_no_task_and_an_unknown_task_are_refused_with_names() -> None:
    with pytest.raises(ConfigError, match="no task was chosen") as none:
        dispatcher.main(["--load", "x"])
    assert "LAMBADA" in str(none.value)
    with pytest.raises(ConfigError, match="there is no such task") as wrong:
        dispatcher.main(["--task", "lambda"])
    assert "did you mean LAMBADA?" in str(wrong.value)


def test_the_flag_may_stand_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str]]] = []

    class Chosen:
        def load(self, name: str) -> object:
            return lambda given, words: seen.append((given, list(words)))

    monkeypatch.setattr(registry, "find", lambda _: Chosen())
    dispatcher.main(["--load", "x", "--task", "A", "--b", "1"])
    dispatcher.main(["--task=A", "--load", "x"])
    assert seen == [("A", ["--load", "x", "--b", "1"]), ("A", ["--load", "x"])]


def test_the_help_of_a_task_names_its_flags(tmp_path: Path) -> None:
    done = run_program([sys.executable, MAIN, "--task", "LAMBADA", "--help"], cwd=tmp_path)
    assert done.status == 0, done.err
    assert "--strict-lambada" in done.out
