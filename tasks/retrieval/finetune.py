"""RET-FINETUNE-NQ: a retriever learns from questions, their right blocks, and wrong ones (DPR).

The loop is that of pretraining, evaluations after each epoch among it; the checkpoints are those of
a retriever, of which tools/create_doc_index.py makes an index.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.arguments import parse_args
from megatron.config.run import RunConfig
from megatron.data.loading.columns import columns
from megatron.engine.base import (
    BatchOptions,
    DatasetRequest,
    Datasets,
    MicroBatch,
    PretrainTask,
    RawBatch,
)
from megatron.errors import ConfigError, Finding, PreflightError
from megatron.initialize import initialize_megatron, shutdown_megatron
from megatron.model.retrieval.biencoder import biencoder_carry
from megatron.training import run
from pretrain_ict import TOKENIZER_TYPE, ict_task
from tasks.finetune.flags import REFUSED
from tasks.finetune.program import FINETUNE_CHECKS
from tasks.retrieval.question_dataset import QuestionDataset
from tasks.retrieval.questions import LabelledQuestion, read_labelled
from tools.retrieval.evidence import RowMaker


class RetrieverFlags(NamedTuple):
    """The flags of a fine-tuning; `config` has no length yet."""

    own: argparse.Namespace
    config: RunConfig

    @property
    def hard(self) -> int:
        """Wrong blocks of each question."""
        number: int = self.own.train_hard_neg if self.own.train_with_neg else 0
        return number


def main(name: str, argv: Sequence[str]) -> None:
    """Read flags and questions, then train."""
    flags = read_retriever_training(name, argv)
    train, valid = read_labelled(flags.own.train_data), read_labelled(flags.own.valid_data)
    config = with_length(flags.config, flags.own.epochs, len(train), len(valid))
    task = retriever_task(config, train, valid, hard=flags.hard)
    runtime = initialize_megatron(config, checks=FINETUNE_CHECKS, reads=task.reads)
    try:
        run(task, runtime)
    finally:
        shutdown_megatron()


def retriever_task(
    config: RunConfig,
    train: Sequence[LabelledQuestion],
    valid: Sequence[LabelledQuestion],
    *,
    hard: int,
) -> PretrainTask:
    """Return the task of a retriever with these questions as its data."""

    def datasets(request: DatasetRequest) -> Datasets:
        """Return the questions to train on, over and over, and those to evaluate by."""
        assert request.tokenizer is not None  # noqa: S101  # invariant: a tower has read with it
        rows = RowMaker(request.tokenizer, request.data.seq_length)
        learned = QuestionDataset(
            train, rows, hard=hard, seed=request.seed, num_samples=request.num_samples[0]
        )
        judged = QuestionDataset(valid, rows, hard=hard, seed=request.seed)
        return Datasets(learned, judged, None)

    def batch(raw: RawBatch, options: BatchOptions) -> MicroBatch:
        """Return the questions, and the blocks of all of them."""
        del options
        questions, question_mask, blocks, block_mask = columns(
            raw, "query_tokens", "query_pad_mask", "context_tokens", "context_pad_mask"
        )
        return MicroBatch(
            biencoder_carry(
                questions, question_mask, blocks.flatten(0, 1), block_mask.flatten(0, 1)
            ),
            (question_mask,),
        )

    return replace(ict_task(config), datasets=datasets, batch=batch)


def with_length(config: RunConfig, epochs: int, train: int, valid: int) -> RunConfig:
    """Return the flags with so many passes over the questions, and an evaluation after each.

    Questions to evaluate by that fill no batch are left out, and so is the last batch of all.

    Raises:
        ConfigError: there are fewer questions than a batch has.
    """
    size = config.training.global_batch_size or config.training.micro_batch_size
    if min(train, valid) < size:
        raise ConfigError(
            "there are fewer questions than a global batch has",
            found=f"{train} to train on, {valid} to evaluate by, --global-batch-size {size}",
            fix="use a smaller --global-batch-size, or more questions",
        )
    each = train // size
    training = replace(
        config.training,
        train_iters=max(1, epochs * each),
        eval_interval=each,
        eval_iters=valid // size,
        eval_only=epochs == 0,
    )
    return replace(config, training=training)


def read_retriever_training(name: str, argv: Sequence[str]) -> RetrieverFlags:
    """Parse the flags of the task.

    Raises:
        PreflightError: with all that is wrong.
    """
    own, rest = _parser(name).parse_known_args(argv)
    given = [word.partition("=")[0] for word in rest if word.startswith("--")]
    problems = list(_problems(own, given))
    if problems:
        raise PreflightError(Finding("flags_of_the_task", problem) for problem in problems)
    config = parse_args(
        rest,
        args_defaults={
            "tokenizer_type": TOKENIZER_TYPE,
            "mock_data": True,  # no corpus is read
            "train_iters": 1,  # as many as the epochs have; known when the questions are
        },
    )
    flags, retrieval = config.checkpoint, config.retrieval
    if not (flags.load or flags.pretrained_checkpoint or retrieval.bert_load):
        raise ConfigError(
            "fine-tuning begins with a model that was trained",
            found="neither --pretrained-checkpoint (or --ict-load), --bert-load nor --load",
            fix="add --pretrained-checkpoint FOLDER of a retriever, or --bert-load FOLDER",
        )
    if own.retriever_seq_length is not None:
        data = replace(config.data, seq_length=own.retriever_seq_length)
        config = replace(config, data=data)
    return RetrieverFlags(own, config)


def _problems(own: argparse.Namespace, given: Sequence[str]) -> Iterator[ConfigError]:
    for flag in dict.fromkeys(given):
        if flag in REFUSED:
            yield ConfigError(
                "a flag of pretraining means nothing for fine-tuning",
                found=flag,
                fix=f"use {REFUSED[flag]}",
            )
    if own.epochs < 0 or own.train_hard_neg < 0:
        yield ConfigError(
            "a number is negative",
            found=f"--epochs {own.epochs}, --train-hard-neg {own.train_hard_neg}",
            fix="use 0 epochs to evaluate only, and 0 hard negatives for none",
        )
    if own.train_hard_neg and not own.train_with_neg:
        yield ConfigError(
            "wrong blocks are asked for and not used",
            found=f"--train-hard-neg {own.train_hard_neg} without --train-with-neg",
            fix="add --train-with-neg, or leave --train-hard-neg out",
        )


def _parser(name: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"tasks.main --task {name}",
        allow_abbrev=False,
        epilog="All flags of pretrain_ict.py go here too (--num-layers, --lr, --save ...).",
    )
    add = made.add_argument
    add("--train-data", nargs="+", required=True, metavar="FILE", help="DPR's JSON to train on")
    add("--valid-data", nargs="+", required=True, metavar="FILE", help="the same, to evaluate by")
    add("--epochs", type=int, default=3, help="passes over the questions; 0: evaluate only [3]")
    add("--train-with-neg", action="store_true", help="compare with wrong blocks of each question")
    add("--train-hard-neg", type=int, default=0, metavar="N", help="how many of each [0]")
    add(
        "--retriever-seq-length",
        type=int,
        metavar="N",
        help="the most tokens of a block or a question; --seq-length when not given",
    )
    return made
