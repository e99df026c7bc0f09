"""`python tasks/vision/main.py <flags>`: the vision tasks at their path in other Megatrons.

Works from any folder, as a module, as a file and from a wheel. It is the task VISION-CLASSIFY of
`tasks.main`.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

if importlib.util.find_spec("megatron") is None or __package__ in (None, ""):
    # Started as a file: its own folder is on the path, ours is not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.errors import ConfigError
from megatron.program import run_program
from tasks import main as tasks_main

TASK = "VISION-CLASSIFY"
_CLASSIFY = "classify"  # what other Megatrons call it


def main(argv: Sequence[str] | None = None) -> None:
    """Fine-tune or evaluate a classifier of images."""
    name, others = tasks_main.split_task(list(sys.argv[1:] if argv is None else argv))
    if name not in (None, _CLASSIFY, TASK):
        raise ConfigError(
            "there is no such vision task",
            found=f"--task {name}",
            fix=f"use --task {_CLASSIFY}, or leave --task out",
        )
    tasks_main.main(["--task", TASK, *others])


if __name__ == "__main__":
    run_program(main)
