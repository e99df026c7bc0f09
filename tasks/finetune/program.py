"""GLUE's tasks, SNLI and RACE: fine-tune a pretrained BERT, judge it, and write what it decides.

The flags are those of pretrain_bert.py, and of the run that pretrained the model; `--epochs 0`
judges without training. Under torchrun it runs on any tensor x pipeline x data grid, by either
engine.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron import log
from megatron.data.kinds.program_data import BERT_DATA
from megatron.initialize import initialize_megatron, launch_of_process, shutdown_megatron
from megatron.preflight import data
from megatron.preflight.checks import CHECKS
from megatron.preflight.run import Check
from tasks.finetune.examples import Example
from tasks.finetune.flags import read_flags
from tasks.finetune.glue import TASKS, read_glue
from tasks.finetune.judging import EvaluationFile, EvaluationResult, format_metrics, log_parts
from tasks.finetune.predictions import prediction_of, written
from tasks.finetune.questions import QUESTIONS, RACE
from tasks.finetune.race import read_race
from tasks.finetune.rows import Rows, make_rows
from tasks.finetune.start import finetuning_config, start_of
from tasks.finetune.training import FineTuning, FineTuningResult
from tasks.results import check_output, write_result
from tools.preprocessing.text_output import write_text_files

# Those of pretraining but what is about corpora, which are not read here.
FINETUNE_CHECKS: tuple[Check, ...] = tuple(
    check for check in CHECKS if check.__module__ != data.__name__
)


def main(name: str, argv: Sequence[str]) -> None:
    """Read flags and files, train if asked, evaluate, and write predictions."""
    own, config = read_flags(name, argv)
    check_output(own.output)
    check_output(own.predictions, "--predictions")
    question = QUESTIONS[name]
    start = start_of(config.checkpoint, epochs=own.epochs)
    start = start._replace(load_except=tuple(own.load_except))
    learns = own.epochs > 0
    train = _read(name, own.train_data, needs_labels=True) if learns else []
    valid, parts = _read_parts(name, own.valid_data, needs_labels=learns)
    config = finetuning_config(
        config, start, launch=launch_of_process(), epochs=own.epochs, examples=len(train)
    )
    runtime = initialize_megatron(config, checks=FINETUNE_CHECKS, reads=BERT_DATA)
    try:
        made = [
            make_rows(part, runtime.tokenizer, seq_length=config.data.seq_length)
            for part in (train, valid)
            if part
        ]
        _warn_of_truncation(made)
        tuning, rows = FineTuning(config, runtime, question, start), made[-1]
        outcome = None
        if own.epochs:
            outcome = tuning.train(made[0], rows, parts, epochs=own.epochs)
            if outcome.stopped is not None:
                log.info(f"stopped: {outcome.stopped}; --load of the same --save goes on")
                return
            _log_best(name, outcome)
        judged = tuning.judge(rows) if outcome is None else outcome.best
        metrics = format_metrics(judged.metrics) or "no labels to compare with"
        log.info(f" {name} | examples: {len(rows)} | {metrics} |")
        log_parts(judged, parts, question, rows, name)
        if runtime.context.rank == 0:
            _write(own, name, judged, (valid, rows, parts), outcome)
    finally:
        shutdown_megatron()


def _read(name: str, files: Sequence[str], *, needs_labels: bool) -> list[Example]:
    if name == RACE:
        return read_race(files, needs_labels=needs_labels)
    return read_glue(TASKS[name], files, needs_labels=needs_labels)


def _read_parts(
    name: str, files: Sequence[str], *, needs_labels: bool
) -> tuple[list[Example], tuple[EvaluationFile, ...]]:
    """Return the examples of all files, and the range of each file."""
    stems = [Path(file).stem for file in files]
    names = stems if len(set(stems)) == len(stems) else list(files)
    examples: list[Example] = []
    parts = []
    for file, called in zip(files, names):
        read = _read(name, [file], needs_labels=needs_labels)
        parts.append(EvaluationFile(called, range(len(examples), len(examples) + len(read))))
        examples += read
    return examples, tuple(parts)


def _warn_of_truncation(parts: Sequence[Rows]) -> None:
    cut, total = (
        sum(part.truncated for part in parts),
        sum(part.text[..., 0].numel() for part in parts),
    )
    if cut:
        log.warning(
            f"{cut} of {total} rows ({100 * cut / total:.1f} %) are longer than --seq-length and "
            "were cut at the end"
        )


def _log_best(name: str, outcome: FineTuningResult) -> None:
    metrics = format_metrics(outcome.best.metrics)
    log.info(f" best of {name}: epoch {outcome.best_epoch} | {metrics} |")


def _write(
    own: argparse.Namespace,
    name: str,
    judged: EvaluationResult,
    of: tuple[Sequence[Example], Rows, tuple[EvaluationFile, ...]],
    outcome: FineTuningResult | None,
) -> None:
    """Write the files that were asked for."""
    (examples, rows, parts), question = of, QUESTIONS[name]
    if own.predictions is not None:
        places = [part.name for part in parts for _ in part.examples]
        table = [
            prediction_of(question, example, scores, place)
            for example, scores, place in zip(examples, judged.scores.tolist(), places, strict=True)
        ]
        write_text_files({Path(own.predictions): written(name, question, table)})
    result: dict[str, Any] = {"task": name, "examples": len(rows), **judged.metrics}
    if len(parts) > 1:
        result["files"] = {
            part.name: {
                "examples": len(part.examples),
                **judged.metrics_of(part, question, rows.labels),
            }
            for part in parts
        }
    if outcome is not None:
        result["best_epoch"] = outcome.best_epoch
    write_result(own.output, result)
