"""Pretrain a GPT: `torchrun --nproc-per-node N pretrain_gpt.py <flags>`, or `python` alone.

What is here is what makes it GPT: datasets, layers, batch and loss, as one `PretrainTask`. Flags
are read before anything that imports torch, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.command import pretrain_from_flags
from megatron.program import run_program

if TYPE_CHECKING:
    from megatron.engine.base import PretrainTask


# Megatron's scripts for GPT name no tokenizer: it is GPT-2's unless they do.
TOKENIZER_TYPE = "GPT2BPETokenizer"


def program() -> None:
    """Train, and end with the exit status of the outcome; also installed as a command."""
    run_program(main)


def main() -> None:
    """Read the flags, then train."""
    pretrain_from_flags(lambda _: gpt_task(), tokenizer_type=TOKENIZER_TYPE)


def gpt_task() -> PretrainTask:
    """Return the GPT task: its data, its layers and its loss."""
    from torch import Tensor

    from megatron.config.model import ModelConfig
    from megatron.data.kinds.program_data import GPT_DATA
    from megatron.data.loading.gpt_batch import decoder_batch
    from megatron.engine.base import BatchOptions, MicroBatch, PretrainTask, RawBatch
    from megatron.engine.datasets import datasets_of
    from megatron.model.accounting import flops_per_token
    from megatron.model.gpt_model import gpt_carry, gpt_layers, gpt_loss
    from megatron.model.losses import LossSum, counted_tokens
    from megatron.model.specs import Carry, ModelBuild, TokenFlops

    def batch(raw: RawBatch, options: BatchOptions) -> MicroBatch:
        """Return the loader's batch as the arguments of the model and of the loss."""
        data = options.data
        cut = decoder_batch(raw, data, eod=options.tokenizer.eod)
        # Positions that simply count up are cheaper to make in the model than to pass.
        needs_position_ids = data.reset_position_ids or cut.document_ids is not None
        positions = cut.position_ids if needs_position_ids else None
        return MicroBatch(
            inputs=gpt_carry(cut.tokens, positions, cut.document_ids),
            labels=(cut.labels, cut.loss_mask),
        )

    def loss(carry: Carry, labels: Carry, build: ModelBuild) -> LossSum:
        """Return the cross entropy of the next token, summed over the counted tokens."""
        return gpt_loss(build, carry, *labels)

    def counted(labels: Carry) -> Tensor:
        """Return the number of tokens that the loss counts."""
        return counted_tokens(*labels)

    def flops(config: ModelConfig, build: ModelBuild) -> TokenFlops:
        """Return the FLOPs of a token."""
        return flops_per_token(
            config,
            build.vocab.padded,
            build.seq_length,
            recompute=build.activations,
            virtual_stages=build.virtual_stages,
        )

    return PretrainTask(
        name="gpt",
        reads=GPT_DATA,
        datasets=datasets_of(GPT_DATA),
        layers=gpt_layers,
        batch=batch,
        loss=loss,
        counted=counted,
        flops_per_token=flops,
    )


if __name__ == "__main__":
    program()
