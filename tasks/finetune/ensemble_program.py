"""The task ENSEMBLE-CLASSIFIER: joins files of --predictions, and judges what comes out.

No model is run and no process group is made: predictions are all that it reads.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron import log
from megatron.errors import ConfigError, DataError
from tasks.finetune.ensemble import Combine, check_alike, check_weights, combined
from tasks.finetune.examples import ClassificationQuestion
from tasks.finetune.judging import format_metrics, metrics_of
from tasks.finetune.predictions import (
    Prediction,
    Predictions,
    decision_of,
    read_predictions,
    written,
)
from tasks.finetune.questions import QUESTIONS
from tasks.finetune.rows import UNKNOWN
from tasks.results import check_output, write_result
from tools.preprocessing.text_output import write_text_files

_NAME = "predictions.tsv"
_FEWEST = 2
_THRESHOLDS = ("--calc-threshold", "--one-threshold", "--threshold", "--labels")


def main(name: str, argv: Sequence[str]) -> None:
    """Read predictions, check that they match, combine them, evaluate, and write."""
    flags = _parsed(name, argv)
    check_output(flags.output)
    files = [read_predictions(_file_of(path, flags.prediction_name)) for path in flags.paths]
    question = _question_of(files[0])
    check_alike(files, question)
    weights = flags.weights
    if weights is not None:
        check_weights(weights, files)
    combine = Combine(flags.combine)
    joined = combined(files, question, combine=combine, weights=weights)
    _check_labels(joined, is_wanted=flags.eval)
    result: dict[str, Any] = {"task": files[0].task, "examples": len(joined)}
    for file in files:
        alone = _judged(question, file.rows)
        log.info(f" {file.path} | {format_metrics(alone) or 'no labels'} |")
    together = _judged(question, joined)
    log.info(
        f" {name} of {len(files)} by {combine} | {files[0].task} | examples: {len(joined)} | "
        f"{format_metrics(together) or 'no labels to compare with'} |"
    )
    if flags.outdir is not None:
        Path(flags.outdir).mkdir(parents=True, exist_ok=True)
        table = written(files[0].task, question, joined)
        write_text_files({Path(flags.outdir) / flags.prediction_name: table})
    models = [{"file": file.path, **_judged(question, file.rows)} for file in files]
    write_result(flags.output, result | together | {"models": models})


def _parsed(name: str, argv: Sequence[str]) -> argparse.Namespace:
    made = argparse.ArgumentParser(prog=f"tasks.main --task {name}", allow_abbrev=False)
    add = made.add_argument
    add(
        "--paths",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files that fine-tuning wrote with --predictions, or folders that hold one",
    )
    add(
        "--prediction-name",
        default=_NAME,
        metavar="NAME",
        help=f"name of the file in folders, and in --outdir [{_NAME}]",
    )
    add(
        "--combine",
        choices=[each.value for each in Combine],
        default=Combine.PROBABILITIES.value,
        help="what is averaged [probabilities]",
    )
    add("--weights", nargs="+", type=float, metavar="W", help="of each path; equal if not given")
    add("--eval", action="store_true", help="end with an error where labels are not known")
    add("--outdir", metavar="FOLDER", help="write the joined predictions into this folder")
    add("--output", metavar="FILE", help="write the metrics there, as JSON")
    for flag in _THRESHOLDS:
        add(flag, nargs="*", help=argparse.SUPPRESS)
    found = made.parse_args(argv)
    given = [flag for flag in _THRESHOLDS if getattr(found, flag[2:].replace("-", "_")) is not None]
    if given:
        raise ConfigError(
            "an ensemble has no thresholds, and its answers have their names already",
            found=" ".join(given),
            fix="leave it out: the answer of the largest combined probability is chosen",
        )
    if len(found.paths) < _FEWEST:
        raise ConfigError(
            "an ensemble is of several models",
            found=f"--paths {' '.join(found.paths)}",
            fix="give the predictions of two models or more",
        )
    return found


def _file_of(path: str, name: str) -> Path:
    found = Path(path)
    return found / name if found.is_dir() else found


def _question_of(file: Predictions) -> ClassificationQuestion:
    if file.task not in QUESTIONS:
        raise DataError(
            "predictions are of a task that is not known",
            found=f"{file.path}: {file.task}",
            fix=f"give predictions of one of {', '.join(QUESTIONS)}",
        )
    return QUESTIONS[file.task]


def _check_labels(rows: Sequence[Prediction], *, is_wanted: bool) -> None:
    unknown = [row.uid for row in rows if not row.label]
    if is_wanted and unknown:
        raise DataError(
            "examples have no label to judge by",
            found=f"--eval; {len(unknown)} of {len(rows)}, such as {unknown[0]}",
            fix="leave out --eval, or give predictions of files with labels",
        )


def _judged(question: ClassificationQuestion, rows: Sequence[Prediction]) -> dict[str, float]:
    labels = [_label(question, row) for row in rows]
    decisions = [decision_of(question, row) for row in rows]
    return metrics_of(question, decisions, torch.tensor(labels, dtype=torch.float64))


def _label(question: ClassificationQuestion, row: Prediction) -> float:
    if not row.label:
        return UNKNOWN
    try:
        return float(row.label) if question.is_grade else question.answers.index(row.label)
    except ValueError:
        raise DataError(
            "a label is not one of its task",
            found=f"{row.uid}: {row.label!r}; wanted {', '.join(question.answers) or 'a number'}",
            fix="judge its examples again",
        ) from None
