"""The commands of a quality run: shown as a user could have typed them, timed, and run once.

What a command makes is kept, so a run that was stopped goes on where it was; seconds of a command
that was skipped are those of its run. CPU seconds are of a whole process tree, and so are the cost
of a run on cores that others use too.
"""

import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import machine
from megatron import log
from megatron.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


class Steps:
    """The steps below one folder, and the time of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = folder / "steps.json"
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, command: Sequence[object]) -> None:
        """Run a command in the project's root unless it is done; its output is shown.

        Raises:
            ConfigError: the step was done by another command.
            SystemExit: it failed; with its status.
        """
        words = [str(word) for word in command]
        shown = shlex.join(["python" if word == sys.executable else word for word in words])
        done = self.taken()
        if name in done:
            if done[name]["command"] != shown:
                raise ConfigError(
                    "the folder holds what another command made",
                    found=f"{self.folder}, {name}: {done[name]['command']}",
                    fix="name another folder with --out, or remove this one",
                )
            return
        print(f"\n=== {name}\n$ {shown}", flush=True)
        before, began = _children_cpu(), time.monotonic()
        # One thread a rank: more of them fight over the cores that ranks share.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        status = subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode
        if status:
            log.error(f"the step '{name}' failed; its message stands above")
            raise SystemExit(status)
        took = {"seconds": time.monotonic() - began, "cpu_seconds": _children_cpu() - before}
        took_all = self.taken() | {name: {"command": shown, **took}}
        self.record.write_text(json.dumps(took_all, indent=1))
        print(f"--- {took['seconds']:.0f} s, {took['cpu_seconds']:.0f} CPU s", flush=True)

    def taken(self) -> dict[str, dict[str, float | str]]:
        """Return command, seconds and CPU seconds by step."""
        if not self.record.exists():
            return {}
        found: dict[str, dict[str, float | str]] = json.loads(self.record.read_text())
        return found

    def write_report(self, path: Path | None, quality: str, **parts: object) -> None:
        """Write what was run, on which machine, and what was found, as JSON; None: nowhere.

        Args:
            quality: the name of the program.
            parts: recipes and findings, by name.
        """
        if path is None:
            return
        report = {"quality": quality, "machine": machine(), **parts, "steps": self.seconds()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")

    def seconds(self) -> dict[str, dict[str, float]]:
        """Return seconds by the clock and of all cores, by step, without the commands."""
        return {
            name: {what: float(value) for what, value in took.items() if what != "command"}
            for name, took in self.taken().items()
        }


def module(name: str, *words: object) -> list[object]:
    """Return the command `python -m name words`."""
    return [sys.executable, "-m", name, *words]


def on_ranks(ranks: int, program: str, *words: object) -> list[object]:
    """Return the command of a program of the project, under torchrun for several ranks."""
    if ranks == 1:
        return [sys.executable, program, *words]
    launcher = module("torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return [*launcher, program, *words]


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
