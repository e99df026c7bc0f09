"""Reads the flags of tasks and of text generation as those programs do, and runs none of them.

What a reader would get wrong: files that flags name are not opened, so that a checkpoint which
contradicts the flags is found by the program itself.
"""

import argparse
import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from megatron.config.run import RunConfig
from megatron.errors import ConfigError, MegatronError, PreflightError
from tasks import registry
from tasks.eval_harness.flags import harness_parser
from tasks.finetune import flags as finetune_flags
from tasks.main import split_task
from tasks.retrieval import finetune, nq
from tasks.zeroshot import program as zeroshot
from tools import generate_text, run_text_generation_server
from tools.flags.model import read_model_flags
from tools.other_programs.table import PROGRAMS
from tools.other_programs.words import translated
from tools.retrieval import create_doc_index

TASKS = "tasks/main.py"
_OF_MODELS = {
    "tools/generate_text.py": generate_text,
    "tools/retrieval/create_doc_index.py": create_doc_index,
    "tools/run_text_generation_server.py": run_text_generation_server,
}
# Of programs in `PROGRAMS`.
_MODULES = {
    "tools.generate_text": "tools/generate_text.py",
    "tools.retrieval.create_doc_index": "tools/retrieval/create_doc_index.py",
    "tasks.main": TASKS,
}


class CheckedFlags(NamedTuple):
    """What is wrong with the flags of a program; `config` is the run of a fine-tuning."""

    config: RunConfig | None
    errors: list[MegatronError]


def check_flags(program: str, words: Sequence[str]) -> CheckedFlags | None:
    """Return what is wrong with the flags of the program at a path; None where they are not read.

    Notes are printed as the program prints them.
    """
    try:
        if program in PROGRAMS:
            other = PROGRAMS[program]
            program, (words, notes) = _MODULES.get(other.module, ""), translated(other, words)
            print("\n".join(notes))
        if program in _OF_MODELS:
            _read_model(_OF_MODELS[program].parser(), words)
            return CheckedFlags(None, [])
        if program != TASKS:
            return None
        name, others = split_task(list(words))
        reader = _READERS.get(_module_of(name))
        return None if name is None or reader is None else CheckedFlags(reader(name, others), [])
    except PreflightError as several:
        return CheckedFlags(None, [finding.error for finding in several.findings])
    except ConfigError as error:
        return CheckedFlags(None, [error])


def _module_of(task: str | None) -> str:
    """Return the module of a task's program; ConfigError where there is none."""
    if task is None:
        raise ConfigError(
            "no task was chosen", found="no --task", fix=f"use one of {', '.join(registry.TASKS)}"
        )
    return registry.find(task).program.partition(":")[0]


def _read_model(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Read flags as a program that uses a model; ConfigError also where argparse would exit."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            read_model_flags(parser, words)
    except SystemExit:
        message = (printed.getvalue().strip().splitlines() or ["--help"])[-1]
        raise ConfigError(
            "a flag is used wrongly", found=message, fix="see --help for what follows each flag"
        ) from None


_READERS: Mapping[str, Callable[[str, Sequence[str]], RunConfig | None]] = {
    "tasks.finetune.program": lambda name, words: finetune_flags.read_flags(name, words).config,
    "tasks.retrieval.nq": lambda name, words: _read_model(nq.parser(), words),
    "tasks.retrieval.finetune": lambda name, words: (
        finetune.read_retriever_training(name, words).config
    ),
    "tasks.zeroshot.program": lambda name, words: _read_model(zeroshot.parser(name), words),
    "tasks.eval_harness.program": lambda name, words: _read_model(harness_parser(name), words),
}
