"""Parameters and floating-point operations of an encoder and its decoder, from the config alone.

The conventions are those of `model/accounting.py`. What a reader would get wrong: FLOPs are those
of a whole row of both stacks, shared out over the encoder's tokens, since these are the tokens that
a run counts.
"""

from dataclasses import replace

from megatron.config.activations import ActivationPolicy, RecomputeMethod, RecomputeModule
from megatron.config.blocks import QkNormScope
from megatron.config.model import ModelConfig, PositionEmbedding
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.model.accounting import (
    block_weights,
    feed_forward_weights,
    norm_parameters,
    norm_parameters_of,
    parameter_count,
)
from megatron.model.specs import TokenFlops

FLOPS_CONVENTION = (
    "6 N + 12 L a d s for the tokens of both stacks, as PaLM (arXiv 2204.02311, appendix B), "
    "per token of the encoder"
)
_NOTHING = ActivationPolicy()  # is recomputed


def t5_parameter_count(
    config: ModelConfig, decoder: EncoderDecoderConfig, vocab_rows: int, seq_length: int
) -> int:
    """Return the number of parameters of a T5 with `vocab_rows` rows of vocabulary.

    `seq_length` is the size of a position table that the config leaves open.
    """
    depth = decoder.decoder_layers(config.num_layers)
    both = parameter_count(
        replace(config, num_layers=config.num_layers + depth), vocab_rows, seq_length
    )
    count = both + depth * _cross_parameters(config) + norm_parameters(config)
    if config.position_embedding_type is PositionEmbedding.RELATIVE:
        count += 2 * decoder.relative_attention_num_buckets * config.num_attention_heads
    return count + (vocab_rows if config.add_bias_linear else 0)


def flops_per_encoder_token(
    config: ModelConfig,
    depth: int,
    *,
    vocab_padded: int,
    lengths: tuple[int, int],
    recompute: ActivationPolicy = _NOTHING,
) -> TokenFlops:
    """Return the FLOPs of a row of both stacks, divided by the tokens of its encoder and rounded.

    Args:
        depth: layers of the decoder.
        vocab_padded: of the head, which reads the tokens of the decoder; 0 for none.
        lengths: tokens of a row of the encoder, and of the decoder.
        recompute: what is computed again; of the first layers of a stage, taken to be one.
    """
    source, target = lengths
    width = 2 * 2 * config.num_attention_heads * config.head_width  # of a query and a key
    weights = 2 * block_weights(config, experts=False, active=True)
    middle = 2 * feed_forward_weights(config, experts=False, active=True)
    own = (source * source * width, target * target * width)
    across = source * target * width
    cross = 2 * (target * _query_weights(config) + source * _key_weights(config))
    layers = config.num_layers * [source * weights + own[0]]
    layers += depth * [target * weights + own[1] + across + cross]
    again = 0
    if recompute.method is RecomputeMethod.UNIFORM:
        again = sum(layers)
    elif recompute.method is RecomputeMethod.BLOCK:
        again = sum(layers[: recompute.num_layers])
    if RecomputeModule.CORE_ATTN in recompute.modules:
        again += config.num_layers * own[0] + depth * (own[1] + across)
    if RecomputeModule.MLP in recompute.modules:
        again += (config.num_layers * source + depth * target) * middle
    model = 3 * (sum(layers) + target * 2 * config.hidden_size * vocab_padded)
    masked = 3 * depth * (own[1] - target * (target + 1) // 2 * width)
    model, masked, again = (round(each / source) for each in (model, masked, again))
    return TokenFlops(model, model - masked, model + again)


def _query_weights(config: ModelConfig) -> int:
    """Return the elements of the matrices that cross attention multiplies the decoder by."""
    return 2 * config.hidden_size * config.num_attention_heads * config.head_width


def _key_weights(config: ModelConfig) -> int:
    """Return the elements of the matrix that cross attention multiplies the encoder by."""
    return 2 * config.hidden_size * config.query_groups * config.head_width


def _cross_parameters(config: ModelConfig) -> int:
    """Return the parameters that a decoder block has beside those of a block."""
    queries = config.num_attention_heads * config.head_width
    keys = config.query_groups * config.head_width
    count = _query_weights(config) + _key_weights(config)
    if config.add_bias_linear or config.add_qkv_bias:
        count += queries + 2 * keys
    if config.add_bias_linear:
        count += config.hidden_size
    if config.qk_layernorm:
        all_heads = config.qk_layernorm_scope is QkNormScope.ALL_HEADS
        count += norm_parameters_of(queries + keys if all_heads else 2 * config.head_width, config)
    place = config.norm_placement
    return count + (place.is_before + place.is_after) * norm_parameters(config)
