"""Fine-tuning through the engine: epochs, a look at the validation data after each, the best kept.

The engine, the schedule and the checkpoints are those of pretraining; what is here is the order of
examples and what is done with scores.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import log
from megatron.checkpointing import load_checkpoint, model_build, save_checkpoint
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.data.program_data import BERT_DATA
from megatron.engine.base import MicroBatch, PretrainTask, RawBatch, on_device
from megatron.engine.datasets import datasets_of
from megatron.engine.native import NativeEngine
from megatron.global_vars import Runtime
from megatron.model.accounting import flops_per_token
from megatron.model.bert_model import bert_carry, classification_layers
from megatron.model.losses import LossSum
from megatron.model.specs import Carry, LayerSpec, ModelBuild
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import ParallelContext
from megatron.pipeline.executor import Executor, StageWork
from megatron.pipeline.plan import pipeline_plan
from megatron.progress import BatchSchedule, Duration, Progress
from megatron.training import plan_step
from tasks.finetune.examples import Question
from tasks.finetune.metrics import METRICS
from tasks.finetune.order import batches_of_epoch, num_batches, share_of_replica
from tasks.finetune.rows import UNKNOWN, Rows

# What a classifier has of a pretrained BERT; its head is new.
PRETRAINED = ("embedding.*", "layers.*", "final_norm.*", "pooler.*")


class Judged(NamedTuple):
    """Scores [n, classes or rows or 1] of all examples, and how good they are."""

    scores: Tensor
    metrics: dict[str, float]  # empty where labels are not known

    def decisions(self, question: Question) -> list[float]:
        """The class, the row or the grade of each example."""
        return _decisions(question, self.scores)


@dataclass(frozen=True)
class Outcome:
    """How a fine-tuning ended."""

    best_epoch: int
    metrics: dict[str, float]  # of the best epoch, on the validation data
    losses: tuple[float, ...]  # mean training loss of each epoch


class FineTuning:
    """A classifier on this rank, from a pretrained BERT or a checkpoint of its own."""

    def __init__(self, config: RunConfig, runtime: Runtime, question: Question) -> None:
        self._config, self._runtime, self._question = config, runtime, question
        self._context: ParallelContext = runtime.context
        training = config.training
        self._batches = BatchSchedule(
            training.micro_batch_size,
            training.global_batch_size or training.micro_batch_size * self._context.dp.size,
            self._context.dp.size,
        )
        build = model_build(runtime)
        task = task_of(question)
        self._engine = NativeEngine(config, task, build, runtime.tokenizer, runtime.timers)
        pipeline = pipeline_plan(config.parallel, config.model.num_layers)
        work = StageWork(self._engine.stage.run, partial(_scores_of, question), pipeline.num_chunks)
        self._reader = Executor(work, self._context.pp, schedule=pipeline.schedule)
        load_checkpoint(config, self._engine, runtime)

    def train(self, rows: Rows, valid: Rows, *, epochs: int) -> Outcome:
        """Train, judging after each epoch; the best so far is what --save holds."""
        size = self._batches.global_batch_size
        duration = Duration(self._batches, train_iters=epochs * num_batches(len(rows), size))
        progress, losses, best = Progress(), [], Judged(torch.empty(0), {})
        best_epoch, first = 0, self._question.metrics[0]
        for epoch in range(1, epochs + 1):
            order = batches_of_epoch(
                len(rows), batch_size=size, seed=self._config.training.seed, epoch=epoch
            )
            total = 0.0
            for batch in order:
                plan = plan_step(self._config, self._batches, duration, progress)
                report = self._engine.train_step(self._raw(rows, batch), plan)
                total += report.loss * len(batch)
                progress = progress.after(
                    samples=size, tokens=size * self._config.data.seq_length, skipped=report.skipped
                )
            losses.append(total / len(rows))
            judged = self.judge(valid)
            said = " | ".join(f"{name}: {value:.4f}" for name, value in judged.metrics.items())
            log.info(f" epoch {epoch}/{epochs} | training loss: {losses[-1]:.4E} | {said} |")
            if best_epoch == 0 or judged.metrics.get(first, 0.0) > best.metrics.get(first, 0.0):
                best, best_epoch = judged, epoch
                save_checkpoint(self._config, self._engine, progress, self._runtime)
        return Outcome(best_epoch, best.metrics, tuple(losses))

    def judge(self, rows: Rows) -> Judged:
        """Score every example once, on all ranks alike, and compare with the labels if known."""
        size = self._batches.samples_per_microbatch
        order = batches_of_epoch(len(rows), batch_size=size, seed=0, epoch=None)
        mine = [self._share(batch, num_microbatches=1)[0] for batch in order]
        self._engine.stage.eval()
        found = self._reader.evaluate((self._microbatch(rows, each) for each in mine), len(mine))
        told: dict[int, list[float]] = {}
        if found and self._context.tp.is_first:
            for which, (scores, _) in zip(mine, found):
                listed = scores.view(self._config.training.micro_batch_size, -1).tolist()
                told |= dict(zip(which, listed))
        everyone: dict[int, list[float]] = {}
        for part in all_gather_object(told, self._context.world):
            everyone |= part
        assert len(everyone) == len(rows)  # noqa: S101  # invariant: each example is in one share
        scores = torch.tensor([everyone[at] for at in range(len(rows))], dtype=torch.float64)
        return Judged(scores, _metrics(self._question, scores, rows.labels))

    def _raw(self, rows: Rows, batch: list[int]) -> Iterator[RawBatch]:
        size = self._config.training.micro_batch_size
        shares = self._share(batch, num_microbatches=self._batches.num_microbatches_at(0))
        return (rows.take(each, size=size) for each in shares)

    def _share(self, batch: list[int], *, num_microbatches: int) -> list[list[int]]:
        return share_of_replica(
            batch,
            micro_batch_size=self._config.training.micro_batch_size,
            replica=self._context.dp.rank,
            replicas=self._context.dp.size,
            num_microbatches=num_microbatches,
        )

    def _microbatch(self, rows: Rows, which: list[int]) -> MicroBatch:
        size = self._config.training.micro_batch_size
        return microbatch(on_device(rows.take(which, size=size)))


def task_of(question: Question) -> PretrainTask:
    """What an engine builds and minimises for a question."""

    def layers(config: ModelConfig, build: ModelBuild) -> tuple[LayerSpec, ...]:
        return classification_layers(config, build, num_classes=question.num_scores)

    def loss(carry: Carry, labels: Carry, build: ModelBuild) -> LossSum:
        return _loss(question, carry[0], labels[0])

    return PretrainTask(
        name="classifier",
        reads=BERT_DATA,
        datasets=datasets_of(BERT_DATA),
        layers=layers,
        batch=lambda raw, options: microbatch(raw),
        loss=loss,
        counted=lambda labels: (labels[0] != UNKNOWN).sum().float(),
        flops_per_token=lambda config, build: flops_per_token(config, 0, build.seq_length),
        losses=("loss",),
    )


def microbatch(raw: RawBatch) -> MicroBatch:
    """All rows of all examples, one below the other, and the labels of the examples."""
    text, types, mask = (raw[name].flatten(0, 1) for name in ("text", "types", "padding_mask"))
    return MicroBatch(bert_carry(text, types, mask), (raw["labels"],))


def finetuning_config(config: RunConfig, *, pretrained: str | None, iterations: int) -> RunConfig:
    """The run's flags with what fine-tuning decides: how long it is, and what is loaded."""
    training = replace(config.training, train_iters=iterations)
    checkpoint = config.checkpoint
    if pretrained is not None:
        checkpoint = replace(checkpoint, load=pretrained, finetune=True, load_only=PRETRAINED)
    elif checkpoint.load is not None:
        checkpoint = replace(checkpoint, finetune=True)
    return replace(config, training=training, checkpoint=checkpoint)


def _loss(question: Question, scores: Tensor, labels: Tensor) -> LossSum:
    """Cross entropy, or the squared error of a grade, summed over the examples with a label."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    known = labels != UNKNOWN
    if question.is_grade:
        each = (wide.view(-1) - labels.to(wide.dtype)).square()
    else:
        by_example = wide.view(len(labels), -1)
        each = F.cross_entropy(by_example, labels.clamp_min(0).long(), reduction="none")
    weights = known.to(wide.dtype)
    return LossSum((each * weights).sum(), weights.sum())


def _scores_of(question: Question, carry: Carry, labels: Carry) -> LossSum:
    """All scores of a micro-batch, example by example; nothing is summed."""
    scores = carry[0].to(torch.promote_types(carry[0].dtype, torch.float32)).flatten()
    return LossSum(scores, torch.zeros_like(scores))


def _decisions(question: Question, scores: Tensor) -> list[float]:
    found: list[float] = (
        scores.view(-1).tolist() if question.is_grade else scores.argmax(-1).tolist()
    )
    return found


def _metrics(question: Question, scores: Tensor, labels: Tensor) -> dict[str, float]:
    known = (labels != UNKNOWN).tolist()
    true = [label for label, is_known in zip(labels.tolist(), known) if is_known]
    said = [d for d, is_known in zip(_decisions(question, scores), known) if is_known]
    return {name: METRICS[name](true, said) for name in question.metrics} if true else {}
