"""LAMBADA, WIKITEXT103, PERPLEXITY, LOGLIKELIHOOD and CHOICE: a GPT scores text it has not seen.

Model and tokenizer are those of the checkpoint. Under torchrun the model is spread over
--tensor-model-parallel-size x --pipeline-model-parallel-size ranks and the rows over the replicas
that are left; results do not depend on any of that.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from megatron import log
from megatron.errors import ConfigError
from megatron.initialize import shutdown_megatron
from tasks.loading import MICRO_BATCH_SIZE, LoadedScorer, load_scorer
from tasks.results import check_output, write_result
from tasks.zeroshot.lambada import evaluate_lambada, read_passages
from tasks.zeroshot.pairs import (
    Keys,
    evaluate_choices,
    evaluate_pairs,
    read_pairs,
    read_questions,
)
from tasks.zeroshot.perplexity import USUAL_STEP, evaluate_perplexity, read_texts
from tools.flags.model import add_model_flags, read_model_flags


class Result(Protocol):
    """The result of an evaluation."""

    def describe(self) -> str:
        """Return one line for the log."""

    def numbers(self) -> dict[str, Any]:
        """Return the content of a file of results."""


Evaluate = Callable[[LoadedScorer], Result]


class _Task(NamedTuple):
    """One task: its files, its flags, and the reader that runs before a model is loaded."""

    files: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    prepare: Callable[[argparse.Namespace], Evaluate]


def main(name: str, argv: Sequence[str]) -> None:
    """Read the flags, evaluate, and print the result on rank 0."""
    own, choice = read_model_flags(parser(name), argv)
    check_output(own.output)
    # Files are read before the model: what is wrong with them is known within a second.
    evaluate = _TASKS[name].prepare(own)
    loaded = load_scorer(
        choice.folder,
        choice.iteration,
        given=choice.given,
        weight_quantization=choice.weight_quantization,
    )
    try:
        result = evaluate(loaded)
        words = f" validation results on {name} | {result.describe()}"
        frame = "-" * len(words)
        log.info("\n".join([f"{name} is evaluated", frame, words, frame]))
        if loaded.ctx.rank == 0:
            write_result(own.output, {"task": name, **result.numbers()})
    finally:
        shutdown_megatron()


def parser(name: str) -> argparse.ArgumentParser:
    """Return the flags of one of the tasks."""
    made = argparse.ArgumentParser(prog=f"tasks.main --task {name}", allow_abbrev=False)
    add_model_flags(made)
    add_row_flags(made)
    add = made.add_argument
    add("--valid-data", nargs="+", required=True, metavar="FILE", help=_TASKS[name].files)
    add("--output", metavar="FILE", help="also write the result there, as JSON")
    _TASKS[name].add_flags(made)
    return made


def add_row_flags(made: argparse.ArgumentParser) -> None:
    """Add the flags for the number and length of rows, and for their ranks."""
    add = made.add_argument
    add(
        "--micro-batch-size",
        "--batch-size",  # its name in scripts of 2020, with the same results whatever it is
        type=int,
        metavar="N",
        help=f"rows that a replica reads together [{MICRO_BATCH_SIZE}]",
    )
    add("--seq-length", type=int, metavar="N", help="tokens of a row; as in training if not given")
    add("--pipeline-model-parallel-size", type=int, metavar="N", help="ranks that share layers [1]")


def _lambada_flags(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--strict-lambada",
        action="store_true",
        help="the whole last word counts, not its last token alone",
    )


def _lambada(own: argparse.Namespace) -> Evaluate:
    passages = read_passages(own.valid_data)
    return partial(evaluate_lambada, passages=passages, strict=own.strict_lambada)


def _window_flags(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--overlapping-eval",
        type=int,
        metavar="STEP",
        help="tokens that each further window scores, the rest of it being context; when not "
        f"given {USUAL_STEP}, or the whole window where that is shorter",
    )


def _perplexity(own: argparse.Namespace, *, is_wikitext: bool) -> Evaluate:
    if own.overlapping_eval is not None and own.overlapping_eval < 1:
        raise ConfigError(
            "a size is not positive",
            found=f"--overlapping-eval {own.overlapping_eval}",
            fix="use a whole number from 1",
        )
    texts = read_texts(own.valid_data)
    return partial(
        evaluate_perplexity, texts=texts, step=own.overlapping_eval, is_wikitext=is_wikitext
    )


def _pair_flags(made: argparse.ArgumentParser) -> None:
    names = Keys()
    add = made.add_argument
    add("--context-key", default=names.context, help="field of what is given [%(default)s]")
    add("--continuation-key", default=names.continuation, help="field of what is scored")


def _pairs(own: argparse.Namespace) -> Evaluate:
    keys = Keys(context=own.context_key, continuation=own.continuation_key)
    return partial(evaluate_pairs, pairs=read_pairs(own.valid_data, keys))


def _choice_flags(made: argparse.ArgumentParser) -> None:
    names = Keys()
    add = made.add_argument
    add("--context-key", default=names.context, help="field of what is given [%(default)s]")
    add(
        "--choices-key",
        nargs="+",
        default=list(names.choices),
        metavar="KEY",
        help="field of the list of choices, or one field for each choice",
    )
    add("--label-key", default=names.label, help="field of the right one's number [%(default)s]")
    add("--delimiter", default=" ", help="what stands between context and choice [a space]")


def _choices(own: argparse.Namespace) -> Evaluate:
    keys = Keys(own.context_key, choices=tuple(own.choices_key), label=own.label_key)
    questions = read_questions(own.valid_data, keys)
    return partial(evaluate_choices, questions=questions, delimiter=own.delimiter)


_TASKS: Mapping[str, _Task] = {
    "LAMBADA": _Task("JSON lines with a text each", _lambada_flags, _lambada),
    "WIKITEXT103": _Task(
        "text files, one text each", _window_flags, partial(_perplexity, is_wikitext=True)
    ),
    "PERPLEXITY": _Task(
        "text files, one text each", _window_flags, partial(_perplexity, is_wikitext=False)
    ),
    "LOGLIKELIHOOD": _Task(
        "JSON lines with a context and a continuation each", _pair_flags, _pairs
    ),
    "CHOICE": _Task(
        "JSON lines with a context, choices and the number of the right one each",
        _choice_flags,
        _choices,
    ),
}
