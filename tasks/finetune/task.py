"""A classifier on a BERT as a value for the engines: its layers, its loss, and its scores."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpoint.model_kind import BERT, CLASSIFIER
from megatron.config.model import ModelConfig
from megatron.data.kinds.program_data import BERT_DATA
from megatron.data.loading.columns import columns
from megatron.engine.base import MicroBatch, PretrainTask, RawBatch
from megatron.engine.datasets import datasets_of
from megatron.model.accounting import flops_per_token
from megatron.model.bert_model import bert_carry, classification_layers
from megatron.model.losses import LossSum
from megatron.model.specs import Carry, LayerSpec, ModelBuild
from tasks.finetune.examples import ClassificationQuestion
from tasks.finetune.rows import UNKNOWN


def task_of(question: ClassificationQuestion) -> PretrainTask:
    """Return the training task of a question."""

    def layers(config: ModelConfig, build: ModelBuild) -> tuple[LayerSpec, ...]:
        return classification_layers(config, build, num_classes=question.num_scores)

    def loss(carry: Carry, labels: Carry, build: ModelBuild) -> LossSum:
        return _loss(question, carry[0], labels[0])

    return PretrainTask(
        name=CLASSIFIER,
        reads=BERT_DATA,
        datasets=datasets_of(BERT_DATA),
        layers=layers,
        batch=lambda raw, options: microbatch(raw),
        loss=loss,
        counted=lambda labels: (labels[0] != UNKNOWN).sum().float(),
        flops_per_token=lambda config, build: flops_per_token(
            config, 0, build.seq_length, recompute=build.activations
        ),
        losses=("loss",),
        begins_with=(BERT,),
    )


def microbatch(raw: RawBatch) -> MicroBatch:
    """Return the rows of all examples, concatenated, and the examples' labels."""
    *rows, labels = columns(raw, "text", "types", "padding_mask", "labels")
    text, types, mask = (tensor.flatten(0, 1) for tensor in rows)
    return MicroBatch(bert_carry(text, types, mask), (labels,))


def scores_of(carry: Carry, labels: Carry) -> LossSum:
    """Return all scores of a micro-batch, one per total, without summing them."""
    scores = _wide(carry[0]).flatten()
    return LossSum(scores, torch.zeros_like(scores))


def _loss(question: ClassificationQuestion, scores: Tensor, labels: Tensor) -> LossSum:
    """Return cross entropy, or a grade's squared error, summed over examples with a label."""
    wide, has_label = _wide(scores), labels != UNKNOWN
    if question.is_grade:
        each = (wide.view(-1) - labels.to(wide.dtype)).square()
    else:
        by_example = wide.view(len(labels), -1)
        each = F.cross_entropy(by_example, labels.clamp_min(0).long(), reduction="none")
    weights = has_label.to(wide.dtype)
    return LossSum((each * weights).sum(), weights.sum())


def _wide(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
