"""Pretrain a T5: `torchrun --nproc-per-node N pretrain_t5.py <flags>`, or `python` alone.

What is here is what makes it T5: datasets, layers, batch and loss, as one `PretrainTask`. A decoder
is as deep as its encoder (`--num-layers`) unless a flag says otherwise; the sequence length is that
of the encoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.command import pretrain_from_flags
from megatron.config.models.encoder_decoder import AS_ENCODER
from megatron.program import run_program

if TYPE_CHECKING:
    from megatron.config.data import DataConfig
    from megatron.config.models.encoder_decoder import EncoderDecoderConfig
    from megatron.engine.base import PretrainTask


# Megatron's scripts for T5 name no tokenizer: it is a lower-casing WordPiece unless they do.
TOKENIZER_TYPE = "BertWordPieceLowerCase"
DEFAULTS = {"decoder_num_layers": AS_ENCODER}


def program() -> None:
    """Train, and end with the exit status of the outcome; also installed as a command."""
    run_program(main)


def main() -> None:
    """Read the flags, then train."""
    pretrain_from_flags(
        lambda config: t5_task(config.encoder_decoder, config.data),
        tokenizer_type=TOKENIZER_TYPE,
        defaults=DEFAULTS,
    )


def t5_task(decoder: EncoderDecoderConfig, data: DataConfig) -> PretrainTask:
    """Return the T5 task: its data, its layers and its loss.

    Args:
        decoder: depth and positions of the model.
        data: decides with `decoder` how long the decoder's rows are.
    """
    from megatron.config.model import ModelConfig
    from megatron.data.kinds.t5_data import decoder_rows, t5_data
    from megatron.data.loading.t5_batch import t5_batch
    from megatron.engine.base import BatchOptions, MicroBatch, PretrainTask, RawBatch
    from megatron.engine.datasets import datasets_of
    from megatron.model.encoder_decoder.accounting import (
        FLOPS_CONVENTION,
        flops_per_encoder_token,
    )
    from megatron.model.losses import LossSum, counted_tokens
    from megatron.model.specs import Carry, LayerSpec, ModelBuild, TokenFlops
    from megatron.model.t5_model import t5_carry, t5_layers, t5_loss

    def layers(config: ModelConfig, build: ModelBuild) -> tuple[LayerSpec, ...]:
        """Return the list of layers, of a decoder that the flags describe."""
        return t5_layers(config, build, decoder)

    def batch(raw: RawBatch, options: BatchOptions) -> MicroBatch:
        """Return the loader's batch as the arguments of the model and of the loss."""
        length = decoder_rows(options.data, decoder).length
        cut = t5_batch(raw, options.tokenizer, decoder_length=length)
        return MicroBatch(
            inputs=t5_carry(cut.tokens, cut.padding_mask, cut.decoder_tokens),
            labels=(cut.labels, cut.loss_mask),
        )

    def loss(carry: Carry, labels: Carry, build: ModelBuild) -> LossSum:
        """Return the cross entropy of the decoder's next token, over the counted tokens."""
        return t5_loss(build, carry, *labels)

    def flops(config: ModelConfig, build: ModelBuild) -> TokenFlops:
        """Return the FLOPs of a row of both stacks, for each token of the encoder."""
        return flops_per_encoder_token(
            config,
            decoder.decoder_layers(config.num_layers),
            vocab_padded=build.vocab.padded,
            lengths=(build.seq_length, decoder_rows(data, decoder).length),
            recompute=build.activations,
        )

    reads = t5_data(decoder)
    return PretrainTask(
        name="t5",
        reads=reads,
        datasets=datasets_of(reads),
        layers=layers,
        batch=batch,
        loss=loss,
        counted=lambda labels: counted_tokens(*labels),
        flops_per_token=flops,
        flops_convention=FLOPS_CONVENTION,
    )


if __name__ == "__main__":
    program()
