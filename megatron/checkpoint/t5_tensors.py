"""Names and shapes of every tensor of a T5, from its config alone.

Like `gpt_tensors` for GPTs, of whose blocks both stacks are made; a test compares them with the
model itself.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron.checkpoint.bert_tensors import WORD_BIAS
from megatron.checkpoint.gpt_tensors import HEAD, Shapes, gpt_tensors, linear_shapes, norm_shapes
from megatron.config.blocks import QkNormScope
from megatron.config.model import ModelConfig, PositionEmbedding
from megatron.config.models.encoder_decoder import EncoderDecoderConfig

STACKS = ("encoder", "decoder")
CONFIG_GROUP = "encoder_decoder"  # of a run's config: what is not in that of the model


def t5_tensors(
    config: ModelConfig,
    decoder: EncoderDecoderConfig,
    *,
    vocab_rows: int,
    positions: int | None,
) -> Shapes:
    """Return whole shapes by global name (without `model/`), in the order of the model.

    Args:
        config: of the encoder, whose shape both stacks have but for the number of layers.
        vocab_rows: rows of the vocabulary, without padding.
        positions: rows of a learned position table; for other kinds of positions not read.
    """
    depths = (config.num_layers, decoder.decoder_layers(config.num_layers))
    shapes: dict[str, tuple[int, ...]] = {}
    for stack, depth in zip(STACKS, depths):
        of_stack = gpt_tensors(
            replace(config, num_layers=depth), vocab_rows=vocab_rows, positions=positions
        )
        shapes |= {name: shape for name, shape in of_stack.items() if name.startswith("embedding.")}
        if config.position_embedding_type is PositionEmbedding.RELATIVE:
            buckets = decoder.relative_attention_num_buckets
            shapes[f"{stack}.relative_positions.weight"] = (buckets, config.num_attention_heads)
        for layer in range(depth):
            block = {n: shape for n, shape in of_stack.items() if n.startswith(f"layers.{layer}.")}
            shapes |= {f"{stack}.{name}": shape for name, shape in block.items()}
            if stack == "decoder":
                shapes |= {f"decoder.layers.{layer}.{name}": one for name, one in _cross(config)}
        shapes |= norm_shapes(f"{stack}.final_norm", config.hidden_size, config)
    if not config.tied:
        shapes[HEAD] = (vocab_rows, config.hidden_size)
    if config.add_bias_linear:
        shapes[WORD_BIAS] = (vocab_rows,)
    return shapes


def _cross(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield what a block of the decoder has beside one of the encoder."""
    hidden, width = config.hidden_size, config.head_width
    heads, groups = config.num_attention_heads, config.query_groups
    bias = config.add_bias_linear
    place = config.norm_placement
    if place.is_before:
        yield from norm_shapes("cross_norm", hidden, config).items()
    if place.is_after:
        yield from norm_shapes("cross_output_norm", hidden, config).items()
    of_heads = bias or config.add_qkv_bias
    for name, rows in (("query", heads * width), ("key_value", 2 * groups * width)):
        yield from linear_shapes(f"cross_attention.{name}", rows, hidden, bias=of_heads)
    if config.qk_layernorm:
        of_all = config.qk_layernorm_scope is QkNormScope.ALL_HEADS
        for name, count in (("query", heads), ("key", groups)):
            normed = count * width if of_all else width
            yield from norm_shapes(f"cross_attention.{name}_norm", normed, config).items()
    yield from linear_shapes("cross_attention.output", hidden, heads * width, bias=bias)
