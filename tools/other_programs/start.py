"""Starts our program for one of another Megatron, with its flags translated."""

import runpy
import sys

from megatron import log
from megatron.program import run_program
from tools.other_programs.table import PROGRAMS
from tools.other_programs.words import translated


def start(path: str) -> None:
    """Run our program for the one at `path`, with the flags of this process, and end with it."""
    run_program(lambda: _run(path))


def _run(path: str) -> None:
    program = PROGRAMS[path]
    translation = translated(program, sys.argv[1:])
    log.info(f"{path} is {program.module} here: {program.about}")
    for note in translation.notes:
        log.info(note)
    sys.argv = [path, *translation.words]
    runpy.run_module(program.module, run_name="__main__", alter_sys=True)
