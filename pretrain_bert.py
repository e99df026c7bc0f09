"""Pretrain a BERT: `torchrun --nproc-per-node N pretrain_bert.py <flags>`, or `python` alone.

What is here is what makes it BERT: datasets, layers, batch and losses, as one `PretrainTask`. Flags
are read before anything that imports torch, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.command import pretrain_from_flags
from megatron.program import run_program

if TYPE_CHECKING:
    from megatron.engine.base import PretrainTask


# Megatron's scripts for BERT name no tokenizer: it is a lower-casing WordPiece unless they do.
TOKENIZER_TYPE = "BertWordPieceLowerCase"


def program() -> None:
    """Train, and end with the exit status of the outcome; also installed as a command."""
    run_program(main)


def main() -> None:
    """Read the flags, then train."""
    pretrain_from_flags(
        lambda config: bert_task(order_head=config.data.bert_binary_head),
        tokenizer_type=TOKENIZER_TYPE,
    )


def bert_task(*, order_head: bool = True) -> PretrainTask:
    """Return the BERT task: its data, its layers and its loss.

    Args:
        order_head: also guess whether the two segments are in their order
            (`--bert-no-binary-head` turns it off).
    """
    import torch
    from torch import Tensor

    from megatron.config.model import ModelConfig
    from megatron.data.kinds.program_data import BERT_DATA
    from megatron.data.loading.bert_batch import bert_batch
    from megatron.engine.base import BatchOptions, MicroBatch, PretrainTask, RawBatch
    from megatron.engine.datasets import datasets_of
    from megatron.model.accounting import bert_flops_per_token
    from megatron.model.bert_model import bert_carry, bert_layers, bert_loss
    from megatron.model.losses import LossSum, counted_tokens
    from megatron.model.specs import Carry, LayerSpec, ModelBuild, TokenFlops

    def layers(config: ModelConfig, build: ModelBuild) -> tuple[LayerSpec, ...]:
        """Return the list of layers, with or without the sentence-order head."""
        return bert_layers(config, build, order_head=order_head)

    def batch(raw: RawBatch, options: BatchOptions) -> MicroBatch:
        """Return the loader's batch as the arguments of the model and of the losses."""
        cut = bert_batch(raw)
        order = (cut.swapped,) if order_head else ()
        return MicroBatch(
            inputs=bert_carry(cut.tokens, cut.types, cut.padding_mask),
            labels=(cut.labels, cut.loss_mask, *order),
        )

    def loss(carry: Carry, labels: Carry, build: ModelBuild) -> LossSum:
        """Return the cross entropies of the masked words and of the order of the segments."""
        return bert_loss(build, carry, *labels)

    def counted(labels: Carry) -> Tensor:
        """Return the number of masked words, and the number of rows."""
        words = counted_tokens(labels[0], labels[1])
        if not order_head:
            return words
        return torch.stack([words, torch.full_like(words, len(labels[2]))])

    def flops(config: ModelConfig, build: ModelBuild) -> TokenFlops:
        """Return the FLOPs of a token."""
        return bert_flops_per_token(
            config,
            build.vocab.padded,
            build.seq_length,
            recompute=build.activations,
            virtual_stages=build.virtual_stages,
        )

    return PretrainTask(
        name="bert",
        reads=BERT_DATA,
        datasets=datasets_of(BERT_DATA),
        layers=layers,
        batch=batch,
        loss=loss,
        counted=counted,
        flops_per_token=flops,
        losses=("lm loss", "sop loss") if order_head else ("lm loss",),
    )


if __name__ == "__main__":
    program()
