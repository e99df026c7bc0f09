"""Say what would become of a launch script that was written for another Megatron.

`python tools/check_launch_script.py SCRIPT [ARGUMENTS]` runs a bash script with stand-ins for its
launchers, so that nothing is trained, and answers for each command that it would start: works,
works with notes, or refused with the reasons, and the same command in our spelling. For a folder:
a table of its scripts. Exit code 1 if anything is refused, or a script starts nothing.
"""

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.errors import ConfigError
from megatron.program import run_program
from tools.launch_scripts.commands import Started, started_by
from tools.launch_scripts.sandbox import EndlessScriptError, recorded
from tools.launch_scripts.verdicts import CommandVerdict, Kind, lines_about, verdict_of

_SCRIPTS = ("*.sh", "*.slurm", "*.sbatch")


class Checked(NamedTuple):
    """A script, and what would become of the commands that it starts."""

    script: Path
    verdicts: tuple[CommandVerdict, ...]
    skipped: tuple[str, ...] = ()
    problem: str = ""  # why it starts nothing

    @property
    def kind(self) -> str:
        """The worst verdict on a command, or that there is none."""
        order = list(Kind)
        kinds = [verdict.kind for verdict in self.verdicts]
        worst = next((k for k in (Kind.REFUSED, Kind.NOTES, *order) if k in kinds), None)
        return "starts nothing" if worst is None else str(worst)

    @property
    def runs(self) -> bool:
        """Whether all that it starts would run."""
        return bool(self.verdicts) and all(v.kind is not Kind.REFUSED for v in self.verdicts)


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags, check the script or all scripts of the folder, and print what was found."""
    flags = _parser().parse_args(argv)
    if flags.script.is_dir():
        scripts = sorted({path for kind in _SCRIPTS for path in flags.script.rglob(kind)})
        if not scripts:
            raise ConfigError(
                "there is no launch script in the folder",
                found=f"{flags.script}, no {' or '.join(_SCRIPTS)}",
                fix="name a folder with scripts, or a script",
            )
        found = [check(script, (), flags.seconds) for script in scripts]
        print("\n".join(table(found, flags.script)))
    else:
        found = [check(flags.script, flags.arguments, flags.seconds)]
        print("\n".join(page(found[0])))
    sys.exit(0 if all(one.runs for one in found) else 1)


def check(script: Path, arguments: Sequence[str], seconds: float) -> Checked:
    """Return what would become of what a script starts.

    Raises:
        ConfigError: there is no such script, or no bash.
    """
    verdicts: dict[Started, CommandVerdict] = {}
    try:
        with recorded(script, arguments, seconds=seconds) as done:
            for call in done.calls:
                started = started_by(call)
                if started is not None and started not in verdicts:
                    with contextlib.chdir(call.folder):  # where its flags name what it has written
                        verdicts[started] = verdict_of(started)
    except EndlessScriptError as error:
        return Checked(script, (), problem=str(error))
    problem = ""
    if not verdicts:
        problem = f"it ended with status {done.status} and started no program\n{done.said}".strip()
    return Checked(script, tuple(verdicts.values()), done.skipped, problem)


def page(checked: Checked) -> Iterator[str]:
    """Yield the lines about one script."""
    yield f"{checked.script}: {checked.kind}"
    if checked.problem:
        yield from (f"  {line}" for line in checked.problem.splitlines())
    for verdict in checked.verdicts:
        yield ""
        yield from lines_about(verdict)
    if checked.skipped:
        yield ""
        yield "not run:"
        yield from (f"  {call}" for call in checked.skipped)


def table(found: Sequence[Checked], folder: Path) -> Iterator[str]:
    """Yield a table of scripts with the first reason of each that is refused, and the share."""
    width = max(len(str(one.script.relative_to(folder))) for one in found)
    for one in found:
        reasons = [reason for verdict in one.verdicts for reason in verdict.reasons]
        first = (reasons or [one.problem])[0]
        shown = " ".join(first.split())
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        yield f"{one.script.relative_to(folder)!s:{width}}  {one.kind:18}  {shown}{more}".rstrip()
    yield ""
    yield f"{sum(one.runs for one in found)} of {len(found)} scripts would run"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", type=Path, help="a bash script, or a folder of them")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    parser.add_argument(
        "--seconds", type=float, default=30, help="after which a script is ended [%(default)s]"
    )
    return parser


if __name__ == "__main__":
    run_program(main)
