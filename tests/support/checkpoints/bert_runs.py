"""Bodies for `run_on_ranks` that train BERTs from checkpoints.

Unlike `hf_bert` this imports no `transformers`, which takes more than a second in every rank.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megatron.config.run import RunConfig
from megatron.engine.base import BatchOptions, MicroBatch, RawBatch
from megatron.errors import CheckpointError
from megatron.initialize import shutdown_megatron
from pretrain_bert import bert_task
from tasks.main import main
from tests.support.tiny import train


class Continued(NamedTuple):
    """What a run did: the losses of its steps, and the batches that it was given."""

    losses: list[tuple[float, ...]]
    batches: list[dict[str, Tensor]]


def train_and_keep(configs: Sequence[RunConfig]) -> list[Continued]:
    """Train several BERTs one after the other in the same processes."""
    return [_train_one(config) for config in configs]


def _train_one(config: RunConfig) -> Continued:
    task, kept = bert_task(order_head=config.data.bert_binary_head), []

    def batch(raw: RawBatch, options: BatchOptions) -> MicroBatch:
        kept.append({name: tensor.clone() for name, tensor in raw.items()})
        return task.batch(raw, options)

    record = train(config, dataclasses.replace(task, batch=batch))
    return Continued([step.each_loss for step in record.steps], kept)


def train_or_error(configs: Sequence[RunConfig]) -> list[str]:
    """Return what stopped each run, if anything did."""
    messages = []
    for config in configs:
        try:
            train_and_keep([config])
        except CheckpointError as error:
            messages.append(str(error))
        else:
            messages.append("")
        finally:
            shutdown_megatron()
    return messages


def fine_tune(words: Sequence[str]) -> str:
    """Fine-tune with these flags; return what stopped it, if anything did."""
    try:
        main(words)
    except CheckpointError as error:
        return str(error)
    return ""
