"""Names and shapes of every tensor of a GPT, from its config alone.

Other formats need the list of a model's tensors before it is built. A test compares it with the
model itself, which this layer does not import.
"""

from collections.abc import Iterator, Mapping

from megatron.config.blocks import QkNormScope
from megatron.config.experts import MlpType
from megatron.config.model import ModelConfig, Normalization, PositionEmbedding, SoftmaxType

Shapes = Mapping[str, tuple[int, ...]]

WORD_TABLE = "embedding.word.weight"
POSITION_TABLE = "embedding.position.weight"
HEAD = "output.weight"


def gpt_tensors(config: ModelConfig, *, vocab_rows: int, positions: int | None) -> Shapes:
    """Return whole shapes by global name (without `model/`), in the order of the model.

    Args:
        vocab_rows: rows of the vocabulary, without padding.
        positions: rows of a learned position table; for other kinds of positions not read.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {WORD_TABLE: (vocab_rows, hidden)}
    if config.embed_layernorm:
        shapes |= norm_shapes("embedding.norm", hidden, config)
    if config.position_embedding_type is PositionEmbedding.LEARNED:
        assert positions is not None  # noqa: S101  # invariant: callers read the table's rows
        shapes[POSITION_TABLE] = (positions, hidden)
    for layer, has_experts in enumerate(config.expert_layers):
        tensors = _block(config, has_experts=has_experts)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in tensors}
    shapes |= norm_shapes("final_norm", hidden, config)
    if not config.tied:
        shapes[HEAD] = (vocab_rows, hidden)
    return shapes


def _block(config: ModelConfig, *, has_experts: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = config.hidden_size, config.head_width
    heads, groups = config.num_attention_heads, config.query_groups
    bias = config.add_bias_linear
    halves = 1 if config.glu is None else 2
    place = config.norm_placement
    if place.is_before:
        yield from norm_shapes("input_norm", hidden, config).items()
    if place.is_after:
        yield from norm_shapes("attention_output_norm", hidden, config).items()
    if config.softmax_type is SoftmaxType.LEARNABLE:
        yield "attention.sinks", (heads,)
    yield from linear_shapes(
        "attention.qkv", (heads + 2 * groups) * width, hidden, bias=bias or config.add_qkv_bias
    )
    if config.qk_layernorm:
        of_all = config.qk_layernorm_scope is QkNormScope.ALL_HEADS
        for name, count in (("query", heads), ("key", groups)):
            normed = count * width if of_all else width
            yield from norm_shapes(f"attention.{name}_norm", normed, config).items()
    yield from linear_shapes("attention.output", hidden, heads * width, bias=bias)
    if place.is_before:
        yield from norm_shapes("post_attention_norm", hidden, config).items()
    if place.is_after:
        yield from norm_shapes("mlp_output_norm", hidden, config).items()
    if has_experts:
        experts, width = config.num_experts or 1, config.expert_width
        yield from linear_shapes("mlp.router", experts, hidden, bias=config.moe_router_add_bias)
        if config.moe_router_enable_expert_bias:
            yield "mlp.router.expert_bias", (experts,)
        for name, outputs, inputs in (("fc1", halves * width, hidden), ("fc2", hidden, width)):
            for part, shape in linear_shapes(f"mlp.experts.{name}", outputs, inputs, bias=bias):
                yield part, (experts, *shape)
        shared = config.shared_expert_width
        if config.mlp_type is MlpType.RESIDUAL:
            yield "mlp.shared_expert.gate", (2, hidden)
            yield "mlp.shared_expert.gate_bias", (2,)
        elif config.moe_shared_expert_gate:
            yield "mlp.shared_expert.gate", (1, hidden)
        if shared is not None:
            yield from linear_shapes("mlp.shared_expert.fc1", halves * shared, hidden, bias=bias)
            yield from linear_shapes("mlp.shared_expert.fc2", hidden, shared, bias=bias)
        return
    yield from linear_shapes("mlp.fc1", halves * config.ffn_width, hidden, bias=bias)
    yield from linear_shapes("mlp.fc2", hidden, config.ffn_width, bias=bias)


def norm_shapes(name: str, width: int, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the parameters of the norm `name` over `width` channels."""
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (width,)}
    if config.normalization is Normalization.LAYER_NORM:
        shapes[f"{name}.bias"] = (width,)
    return shapes


def linear_shapes(
    name: str, outputs: int, inputs: int, *, bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the parameters of the linear layer `name`."""
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)
