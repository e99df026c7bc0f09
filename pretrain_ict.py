"""Pretrain a retriever by the inverse cloze task: `torchrun --nproc-per-node N pretrain_ict.py ..`.

Two BERTs learn which block of text a sentence was taken from (arXiv 1906.00300). What is here makes
it that: datasets, layers, batch and loss, as one `PretrainTask`. Flags are read before anything
that imports torch, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.command import pretrain_from_flags
from megatron.program import run_program

if TYPE_CHECKING:
    from megatron.config.run import RunConfig
    from megatron.engine.base import PretrainTask


# As for a BERT, which the towers are.
TOKENIZER_TYPE = "BertWordPieceLowerCase"


def program() -> None:
    """Train, and end with the exit status of the outcome; also installed as a command."""
    run_program(main)


def main() -> None:
    """Read the flags, then train."""
    pretrain_from_flags(ict_task, tokenizer_type=TOKENIZER_TYPE)


def ict_task(config: RunConfig) -> PretrainTask:
    """Return the inverse cloze task of a run: its data, its two towers and its loss."""
    from functools import partial

    import torch
    from torch import Tensor

    from megatron.checkpoint.model_kind import BIENCODER
    from megatron.config.model import ModelConfig
    from megatron.data.kinds.program_data import ict_data
    from megatron.data.loading.ict_batch import ict_batch
    from megatron.engine.base import BatchOptions, MicroBatch, PretrainTask, RawBatch
    from megatron.engine.datasets import datasets_of
    from megatron.model.losses import LossSum
    from megatron.model.retrieval.accounting import biencoder_flops_per_token
    from megatron.model.retrieval.biencoder import biencoder_carry, biencoder_layers
    from megatron.model.retrieval.loss import accuracy_among, biencoder_loss
    from megatron.model.specs import Carry, LayerSpec, ModelBuild, TokenFlops

    retrieval = config.retrieval

    def layers(model: ModelConfig, build: ModelBuild) -> tuple[LayerSpec, ...]:
        """Return both towers."""
        return biencoder_layers(model, build, retrieval)

    def batch(raw: RawBatch, options: BatchOptions) -> MicroBatch:
        """Return the loader's batch as the inputs of both towers; block i is of question i."""
        cut = ict_batch(raw)
        return MicroBatch(
            inputs=biencoder_carry(cut.questions, cut.question_mask, cut.blocks, cut.block_mask),
            labels=(cut.block_data,),
        )

    def loss(carry: Carry, labels: Carry, build: ModelBuild) -> LossSum:
        """Return the cross entropy of the right blocks."""
        del labels, build
        return biencoder_loss(carry)

    def counted(labels: Carry) -> Tensor:
        """Return the number of questions."""
        return torch.tensor(float(len(labels[0])), device=labels[0].device)

    def flops(model: ModelConfig, build: ModelBuild) -> TokenFlops:
        """Return the FLOPs of a token: of the two that a sample has at each place."""
        return biencoder_flops_per_token(
            model,
            build.seq_length,
            recompute=build.activations,
            virtual_stages=build.virtual_stages,
        )

    reads = ict_data(retrieval)
    return PretrainTask(
        name=BIENCODER,
        reads=reads,
        datasets=datasets_of(reads),
        layers=layers,
        batch=batch,
        loss=loss,
        counted=counted,
        flops_per_token=flops,
        losses=("retrieval loss",),
        metrics={
            f"top{k}_acc": partial(accuracy_among, k)
            for k in retrieval.retriever_report_topk_accuracies
        },
    )


if __name__ == "__main__":
    program()
