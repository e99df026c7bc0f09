"""Names and shapes of every tensor of a GPT, from its config alone.

A format that is not ours has to know what a model consists of before there is one. Held to the
model itself by a test, since this layer does not import it.
"""

from collections.abc import Iterator, Mapping

from megatron.config.model import ModelConfig, Normalization, PositionEmbedding

Shapes = Mapping[str, tuple[int, ...]]

WORD_TABLE = "embedding.word.weight"
POSITION_TABLE = "embedding.position.weight"
HEAD = "output.weight"


def gpt_tensors(config: ModelConfig, *, vocab_rows: int, positions: int | None) -> Shapes:
    """Whole shapes by global name (without `model/`), in the order of the model.

    Args:
        vocab_rows: rows of the vocabulary, without padding.
        positions: rows of a learned position table; for other kinds of positions not read.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {WORD_TABLE: (vocab_rows, hidden)}
    if config.embed_layernorm:
        shapes |= _norm("embedding.norm", hidden, config)
    if config.position_embedding_type is PositionEmbedding.LEARNED:
        assert positions is not None  # noqa: S101  # invariant: callers read the table's rows
        shapes[POSITION_TABLE] = (positions, hidden)
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _block(config)}
    shapes |= _norm("final_norm", hidden, config)
    if not config.tied:
        shapes[HEAD] = (vocab_rows, hidden)
    return shapes


def _block(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = config.hidden_size, config.head_width
    heads, groups = config.num_attention_heads, config.query_groups
    bias = config.add_bias_linear
    middle = (1 if config.glu is None else 2) * config.ffn_width
    yield from _norm("input_norm", hidden, config).items()
    yield from _linear(
        "attention.qkv", (heads + 2 * groups) * width, hidden, bias=bias or config.add_qkv_bias
    )
    if config.qk_layernorm:
        yield from _norm("attention.query_norm", width, config).items()
        yield from _norm("attention.key_norm", width, config).items()
    yield from _linear("attention.output", hidden, heads * width, bias=bias)
    yield from _norm("post_attention_norm", hidden, config).items()
    yield from _linear("mlp.fc1", middle, hidden, bias=bias)
    yield from _linear("mlp.fc2", hidden, config.ffn_width, bias=bias)


def _norm(name: str, width: int, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (width,)}
    if config.normalization is Normalization.LAYER_NORM:
        shapes[f"{name}.bias"] = (width,)
    return shapes


def _linear(
    name: str, outputs: int, inputs: int, *, bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)
