"""T5 written down once, as a list: an encoder, a decoder that sees its output, and a head.

`T5Model` and every pipeline stage run slices of that list. What a reader would get wrong: between
the layers travels all that later ones need, so that the list can be cut anywhere: the encoder's
output and its padding mask go through all layers of the decoder.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from megatron.config.model import ModelConfig, PositionEmbedding
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.errors import ConfigError
from megatron.model.embedding import WordEmbedding
from megatron.model.encoder_decoder.cross_attention import DecoderBlock
from megatron.model.encoder_decoder.embedding import SharedEmbedding
from megatron.model.encoder_decoder.geometry import StackGeometry
from megatron.model.encoder_decoder.relative_positions import RelativePositions
from megatron.model.gpt_model import WORD_EMBEDDING, gpt_loss
from megatron.model.heads import VocabularyBias, build_output
from megatron.model.losses import LossSum
from megatron.model.norms import build_norm
from megatron.model.specs import Carry, LayerSpec, ModelBuild
from megatron.model.stage import assemble, run_layers
from megatron.model.transformer import Block, block_layers

EMBEDDING = "embedding"
ENCODER_OUTPUT = "encoder.final_norm"


def t5_layers(
    config: ModelConfig, build: ModelBuild, decoder: EncoderDecoderConfig
) -> tuple[LayerSpec, ...]:
    """Return the layers of a T5 in order: encoder, decoder, head.

    The carry goes in as `t5_carry` makes it. It travels through the encoder as (hidden [s, b, h],
    padding mask [b, s], decoder tokens [b, d], table?) and through the decoder as (hidden
    [d, b, h], encoder output [s, b, h], padding mask [b, s], table?), where the table [buckets,
    a/tp] is that of relative positions. It comes out as (logits [d, b, v/tp],), or with
    `build.fuse_loss` and without an output bias as (hidden, weight [v/tp, h]), for `t5_loss`. Under
    sequence parallelism hidden states are [s/tp, b, h] and [d/tp, b, h].

    Raises:
        ConfigError: there is no decoder, or see `unsupported_settings`.
    """
    for problem in unsupported_settings(
        config,
        cp=build.ctx.cp.size,
        distributes=build.activations.distribute,
    ):
        raise problem
    depth = decoder.decoder_layers(config.num_layers)
    if not depth:
        raise no_decoder()
    of_decoder = replace(config, num_layers=depth)
    encoder_geometry = StackGeometry(config, build, decoder, causal=False)
    decoder_geometry = StackGeometry(config, build, decoder, causal=True)
    embedding = partial(SharedEmbedding, config, build)
    norm = partial(build_norm, config, build)
    has_bias = config.add_bias_linear
    call = "projection" if build.fuse_loss and not has_bias else "logits"
    if config.tied:
        word = partial(WordEmbedding, config, build)
        head = LayerSpec(WORD_EMBEDDING, word, tied=EMBEDDING, call=call)
    else:
        head = LayerSpec("output", partial(build_output, config, build), call=call)
    bias = LayerSpec("output_bias", partial(VocabularyBias, build))
    return (
        LayerSpec(EMBEDDING, embedding, tied=EMBEDDING, call="encoder"),
        *_table("encoder", config, build, decoder),
        *block_layers(
            partial(Block, config, build, encoder_geometry),
            config.num_layers,
            build,
            stack="encoder.",
        ),
        LayerSpec(ENCODER_OUTPUT, norm, call="final_of_encoder", ends_stack=True),
        LayerSpec(EMBEDDING, embedding, tied=EMBEDDING, call="decoder"),
        *_table("decoder", config, build, decoder),
        *block_layers(
            partial(DecoderBlock, of_decoder, build, decoder_geometry),
            depth,
            build,
            stack="decoder.",
        ),
        LayerSpec("decoder.final_norm", norm, call="final"),
        head,
        *((bias,) if has_bias else ()),
    )


def _table(
    stack: str, config: ModelConfig, build: ModelBuild, decoder: EncoderDecoderConfig
) -> tuple[LayerSpec, ...]:
    """Return the layer that puts the table of relative positions of a stack into the carry."""
    if config.position_embedding_type is not PositionEmbedding.RELATIVE:
        return ()
    table = partial(RelativePositions, config, build, decoder)
    return (LayerSpec(f"{stack}.relative_positions", table),)


def unsupported_settings(config: ModelConfig, *, cp: int, distributes: bool) -> list[ConfigError]:
    """Return an error for each setting that a model of encoder and decoder does not have.

    Args:
        cp: ranks that share a sequence.
        distributes: saved activations are to be split over tensor-parallel ranks, where the table
            of relative positions, which travels with them, is of other heads on each.
    """
    relative = config.position_embedding_type is PositionEmbedding.RELATIVE
    refused = (
        (cp > 1, f"--context-parallel-size {cp}"),
        (config.has_experts, f"--num-experts {config.num_experts}"),
        (config.use_parallel_residual, "--use-parallel-residual"),
        # What adds sinks to the output of a kernel takes as many queries as keys, and gives biases
        # no gradient.
        (config.has_sinks, f"--softmax-type {config.softmax_type}"),
        (config.no_rope_freq is not None, f"--no-rope-freq {config.no_rope_freq}"),
        (
            config.window_attn_skip_freq is not None,
            f"--window-attn-skip-freq {config.window_attn_skip_freq}",
        ),
        (
            relative and distributes,
            "--distribute-saved-activations with --position-embedding-type relative",
        ),
    )
    return [
        ConfigError(
            "a model of an encoder and a decoder was given a setting that it does not have",
            found=given,
            fix=f"leave {given.split()[0]} out",
        )
        for is_given, given in refused
        if is_given
    ]


def no_decoder() -> ConfigError:
    """Return the error of an encoder without a decoder."""
    return ConfigError(
        "a model of an encoder and a decoder has no decoder",
        found="no --decoder-num-layers",
        fix="use --decoder-num-layers 0 for as many layers as the encoder has",
    )


def t5_carry(tokens: Tensor, padding_mask: Tensor, decoder_tokens: Tensor) -> Carry:
    """Return the input of the first layer.

    Args:
        tokens: [b, s] int64, of the encoder.
        padding_mask: [b, s] int64, 1 for tokens and 0 for what fills the row up; a row has one
            token at least.
        decoder_tokens: [b, d] int64. What fills these rows up stands behind their tokens, of which
            none sees it.
    """
    return (tokens, padding_mask, decoder_tokens)


def t5_loss(
    build: ModelBuild, carry: Carry, labels: Tensor, loss_mask: Tensor | None = None
) -> LossSum:
    """Return the language-model loss of the decoder; labels and mask are [b, d]."""
    if build.fuse_loss and len(carry) == 1:  # there is a bias, which the fused loss has not
        build = replace(build, fuse_loss=False)
    return gpt_loss(build, carry, labels, loss_mask)


class T5Model(nn.Module):
    """The whole of T5 on one rank (of each tp group), with the loss.

    It returns logits where it is given no labels, so its loss is computed from them whatever
    `build.fuse_loss` is.
    """

    def __init__(
        self, config: ModelConfig, build: ModelBuild, decoder: EncoderDecoderConfig
    ) -> None:
        super().__init__()
        self.config, self.build = config, replace(build, fuse_loss=False)
        self.decoder_config = decoder
        self.specs: Sequence[LayerSpec] = t5_layers(config, self.build, decoder)
        assemble(self, self.specs)

    def forward(
        self,
        tokens: Tensor,
        padding_mask: Tensor,
        decoder_tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> LossSum | Tensor:
        """Return the loss against `labels` [b, d]; without labels the logits [d, b, v/tp].

        See `t5_carry` for the other arguments. A negative label counts for nothing.
        """
        carry = run_layers(self, self.specs, t5_carry(tokens, padding_mask, decoder_tokens))
        if labels is None:
            return carry[0]
        return t5_loss(self.build, carry, labels, loss_mask)

    def encode(self, tokens: Tensor, padding_mask: Tensor) -> Tensor:
        """Return the encoder's output: [s, b, h], or [s/tp, b, h] under sequence parallelism."""
        last = next(i for i, spec in enumerate(self.specs) if spec.name == ENCODER_OUTPUT)
        carry = t5_carry(tokens, padding_mask, tokens[:, :1])
        return run_layers(self, self.specs[: last + 1], carry)[0]

    def decode(self, memory: Tensor, padding_mask: Tensor, decoder_tokens: Tensor) -> Tensor:
        """Return the logits [d, b, v/tp] of decoder tokens, given the output of `encode`."""
        last = next(i for i, spec in enumerate(self.specs) if spec.name == ENCODER_OUTPUT)
        carry = (memory, padding_mask, decoder_tokens)
        return run_layers(self, self.specs[last + 1 :], carry)[0]
