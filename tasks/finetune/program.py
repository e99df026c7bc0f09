"""GLUE's tasks, SNLI and RACE: fine-tune a pretrained BERT, judge it, and write what it decides.

The flags are those of pretrain_bert.py, and of the run that pretrained the model; `--epochs 0`
judges without training. Under torchrun it runs on any tensor x pipeline x data grid.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megatron import log
from megatron.arguments import parse_args
from megatron.config.run import RunConfig
from megatron.data.program_data import BERT_DATA
from megatron.errors import ConfigError
from megatron.initialize import initialize_megatron, shutdown_megatron
from megatron.preflight.checks import MODEL_CHECKS
from tasks.finetune.examples import Example, Question
from tasks.finetune.glue import TASKS, read_glue
from tasks.finetune.order import num_batches
from tasks.finetune.race import QUESTION, read_race
from tasks.finetune.rows import Rows, make_rows
from tasks.finetune.training import FineTuning, Judged, Outcome, finetuning_config
from tools.text_output import write_text_files

RACE = "RACE"


def main(name: str, argv: Sequence[str]) -> None:
    """Read flags and files, train if asked, judge, and write predictions."""
    own, rest = _parser(name).parse_known_args(argv)
    config = parse_args(
        rest,
        args_defaults={
            "tokenizer_type": "BertWordPieceLowerCase",
            "data_path": ("no corpus",),  # examples are read instead
            "train_iters": 1,  # as many as the epochs have; known when the examples are
            "eval_iters": 0,
        },
    )
    _check(own, config)
    question = QUESTION if name == RACE else TASKS[name].question
    train, valid = _read(name, own.train_data or ()), _read(name, own.valid_data)
    size = config.training.global_batch_size or 1
    config = finetuning_config(
        config,
        pretrained=own.pretrained_checkpoint,
        iterations=max(1, own.epochs * num_batches(len(train), size)),
    )
    runtime = initialize_megatron(config, checks=MODEL_CHECKS, reads=BERT_DATA)
    try:
        rows = [
            make_rows(part, runtime.tokenizer, seq_length=config.data.seq_length)
            for part in (train, valid)
            if part
        ]
        _say_truncation(rows)
        tuning = FineTuning(config, runtime, question)
        if own.epochs:
            _say(name, tuning.train(rows[0], rows[-1], epochs=own.epochs))
        judged = tuning.judge(rows[-1])
        _conclude(name, judged, rows[-1], question, own, is_speaker=runtime.context.rank == 0)
    finally:
        shutdown_megatron()


def _parser(name: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"tasks.main --task {name}",
        allow_abbrev=False,
        epilog="All flags of pretrain_bert.py go here too (--num-layers, --lr, --save ...).",
    )
    add = made.add_argument
    add("--train-data", nargs="+", metavar="FILE", help="files to train on")
    add("--valid-data", nargs="+", required=True, metavar="FILE", help="files to judge by")
    add("--epochs", type=int, default=3, help="passes over the training files; 0: judge only [3]")
    add("--pretrained-checkpoint", metavar="FOLDER", help="a pretrained BERT to begin with")
    add("--predictions", metavar="FILE", help="write there what is decided of --valid-data")
    add("--output", metavar="FILE", help="write the metrics there, as JSON")
    return made


def _check(own: argparse.Namespace, config: RunConfig) -> None:
    if own.epochs < 0:
        raise ConfigError(
            "epochs are negative", found=f"--epochs {own.epochs}", fix="use 0 to judge only"
        )
    if own.epochs and not own.train_data:
        raise ConfigError(
            "there is nothing to train on",
            found=f"--epochs {own.epochs} without --train-data",
            fix="add --train-data FILE, or use --epochs 0",
        )
    if own.pretrained_checkpoint is None and config.checkpoint.load is None:
        raise ConfigError(
            "fine-tuning begins with a model that was trained",
            found="neither --pretrained-checkpoint nor --load",
            fix="add --pretrained-checkpoint FOLDER, or --load FOLDER of a fine-tuned model",
        )
    if own.pretrained_checkpoint is not None and config.checkpoint.load is not None:
        raise ConfigError(
            "two models are given to begin with",
            found=f"--pretrained-checkpoint {own.pretrained_checkpoint}, "
            f"--load {config.checkpoint.load}",
            fix="give one of the two",
        )
    if config.engine.deepspeed:
        raise ConfigError(
            "fine-tuning knows the native engine alone",
            found="--deepspeed",
            fix="leave it out; a checkpoint that DeepSpeed trained loads all the same",
        )


def _read(name: str, files: Sequence[str]) -> list[Example]:
    if not files:
        return []
    return read_race(files) if name == RACE else read_glue(TASKS[name], files)


def _say_truncation(parts: Sequence[Rows]) -> None:
    cut, total = (
        sum(part.truncated for part in parts),
        sum(part.text[..., 0].numel() for part in parts),
    )
    if cut:
        log.warning(
            f"{cut} of {total} rows ({100 * cut / total:.1f} %) are longer than --seq-length and "
            "were cut at the end"
        )


def _say(name: str, outcome: Outcome) -> None:
    said = " | ".join(f"{metric}: {value:.4f}" for metric, value in outcome.metrics.items())
    log.info(f" best of {name}: epoch {outcome.best_epoch} | {said} |")


def _conclude(
    name: str,
    judged: Judged,
    rows: Rows,
    question: Question,
    own: argparse.Namespace,
    *,
    is_speaker: bool,
) -> None:
    """Say the metrics of the model as it is now, and write the files that were asked for."""
    known = " | ".join(f"{metric}: {value:.4f}" for metric, value in judged.metrics.items())
    log.info(f" {name} | examples: {len(rows)} | {known or 'no labels to compare with'} |")
    if not is_speaker:
        return
    files = {}
    if own.predictions is not None:
        files[Path(own.predictions)] = _table(judged, rows, question)
    if own.output is not None:
        result = {"task": name, "examples": len(rows), **judged.metrics}
        files[Path(own.output)] = json.dumps(result, indent=1) + "\n"
    write_text_files(files)


def _table(judged: Judged, rows: Rows, question: Question) -> str:
    """One line for each example: as the file names it, what is decided, and all scores."""
    lines = ["uid\tprediction\tscores"]
    for uid, decision, scores in zip(rows.uids, judged.decisions(question), judged.scores.tolist()):
        said = f"{decision:g}"
        if question.labels:
            said = question.labels[int(decision)]
        elif question.num_choices > 1:
            said = "ABCDEFGH"[int(decision)]
        lines.append(f"{uid}\t{said}\t{' '.join(f'{score:.6g}' for score in scores)}")
    return "\n".join(lines) + "\n"
