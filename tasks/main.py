"""Evaluate or fine-tune a trained model: `python -m tasks.main --task NAME <the task's flags>`.

Works from any folder, as a module, as a file and as the installed command. `--task NAME --help`
lists the flags of one task.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

if importlib.util.find_spec("megatron") is None or __package__ in (None, ""):
    # Started as a file: its own folder is on the path, ours is not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron
from megatron.errors import ConfigError
from megatron.program import run_program
from tasks import registry

HERE = Path(__file__).resolve().parents[1]
_USAGE = "usage: python -m tasks.main --task NAME [--help | the task's flags]"


def program() -> None:
    """Run a task, and end with the exit status of the outcome; also an installed command."""
    run_program(main)


def main(argv: Sequence[str] | None = None) -> None:
    """Choose the task and pass it the other flags."""
    check_tree(megatron.__file__, HERE)
    words = sys.argv[1:] if argv is None else list(argv)
    name, others = split_task(words)
    if name is None:
        if {"-h", "--help"} & set(words):
            print(overview())
            return
        raise ConfigError(
            "no task was chosen", found="no --task", fix=f"use one of {', '.join(registry.TASKS)}"
        )
    registry.find(name).load(name)(name, others)


def overview() -> str:
    """Return the text of --help without a task."""
    width = max(map(len, registry.TASKS))
    lines = [f"  {name:<{width}}  {task.about}" for name, task in registry.TASKS.items()]
    return "\n".join([_USAGE, "", *lines])


def check_tree(imported: str | None, here: Path) -> None:
    """Raise ConfigError when another package named megatron precedes ours on the path."""
    if imported is not None and Path(imported).resolve().parents[1] == here:
        return
    raise ConfigError(
        "another package called megatron is imported than the one that the tasks belong to",
        found=f"{imported}; the tasks are in {here / 'tasks'}",
        fix="remove the other one from PYTHONPATH or the environment, or start in another folder",
    )


def split_task(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the value of --task, and all other arguments."""
    name, others, rest = None, [], list(words)
    while rest:
        word = rest.pop(0)
        if word == "--task" and rest:
            name = rest.pop(0)
        elif word.startswith("--task="):
            name = word.partition("=")[2]
        else:
            others.append(word)
    return name, others


if __name__ == "__main__":
    program()
