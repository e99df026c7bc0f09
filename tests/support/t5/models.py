"""Tiny T5s for tests; see `tests.support.models`."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.config.model import GluActivation, ModelConfig, Normalization, PositionEmbedding
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.model.specs import ModelBuild
from megatron.model.t5_model import T5Model
from tests.support.models import TINY_VOCAB, roughen, tiny_build, tiny_config, tiny_tokens

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration

# Three layers beside two, and so few ranges of distances that short rows reach the last one.
TINY_DECODER = EncoderDecoderConfig(
    decoder_num_layers=3, relative_attention_num_buckets=8, relative_attention_max_distance=9
)
# The flags of the published models: T5 1.0, whose head is tied, and T5 1.1.
T5_1_0: dict[str, Any] = {
    "position_embedding_type": PositionEmbedding.RELATIVE,
    "normalization": Normalization.RMS_NORM,
    "layernorm_epsilon": 1e-6,
    "add_bias_linear": False,
    "relu": True,
    "softmax_scale": 1.0,
    "logit_divisor": 4.0,  # sqrt(hidden_size)
    "kv_channels": 6,
}
T5_1_1: dict[str, Any] = {
    **T5_1_0,
    "relu": False,
    "glu_activation": GluActivation.GEGLU_TANH,
    "logit_divisor": 1.0,
    "untie_embeddings_and_output_weights": True,
}


def tiny_t5(build: ModelBuild | None = None, **changes: Any) -> T5Model:
    """A T5 of two and three layers with rough values, in training mode."""
    build = build or tiny_build()
    model = T5Model(tiny_config(**changes), build, TINY_DECODER)
    roughen(model, build.ctx)
    return model


def tiny_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Two rows, the second with padding: tokens [2, 9], padding mask, decoder tokens [2, 7]."""
    padding = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    return tiny_tokens(2, 9), padding, tiny_tokens(2, 7, seed=1)


def in_transformers(model: T5Model) -> "T5ForConditionalGeneration":
    """The same weights in the T5 of transformers, in float64."""
    from transformers import T5Config, T5ForConditionalGeneration  # which ranks do without

    config = model.config
    theirs: Any = T5ForConditionalGeneration(
        T5Config(
            vocab_size=TINY_VOCAB.true,
            d_model=config.hidden_size,
            d_kv=config.head_width,
            d_ff=config.ffn_width,
            num_layers=config.num_layers,
            num_decoder_layers=TINY_DECODER.decoder_layers(config.num_layers),
            num_heads=config.num_attention_heads,
            relative_attention_num_buckets=TINY_DECODER.relative_attention_num_buckets,
            relative_attention_max_distance=TINY_DECODER.relative_attention_max_distance,
            feed_forward_proj="relu" if config.glu is None else "gated-gelu",
            dropout_rate=0.0,
        )
    ).double()
    missing, unexpected = theirs.load_state_dict(_renamed(model), strict=False)
    assert not unexpected
    assert all("embed_tokens" in name or name == "lm_head.weight" for name in missing)
    theirs.tie_weights()
    theirs.config.scale_decoder_outputs = config.tied
    if not config.tied:
        own = model.get_parameter("output.weight")[: TINY_VOCAB.true]
        theirs.lm_head.weight = torch.nn.Parameter(own.detach())
    evaluating: T5ForConditionalGeneration = theirs.eval()
    return evaluating


def _renamed(model: T5Model) -> dict[str, Tensor]:
    config: ModelConfig = model.config
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        stack, *inside = name.split(".")
        if name == "embedding.word.weight":
            found["shared.weight"] = value[: TINY_VOCAB.true]
        elif stack == "output":
            continue  # which transformers ties to the other table while it loads
        elif inside[0] == "relative_positions":
            at = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            found[at] = value
        elif inside[0] == "final_norm":
            found[f"{stack}.final_layer_norm.weight"] = value
        else:
            block = f"{stack}.block.{inside[1]}.layer"
            _rename_in_block(found, block, ".".join(inside[2:-1]), value, config)
    return found


def _rename_in_block(
    found: dict[str, Tensor], block: str, name: str, value: Tensor, config: ModelConfig
) -> None:
    mlp = 2 if block.startswith("decoder") else 1
    heads = config.num_attention_heads
    simple = {
        "input_norm": "0.layer_norm",
        "attention.output": "0.SelfAttention.o",
        "cross_norm": "1.layer_norm",
        "cross_attention.query": "1.EncDecAttention.q",
        "cross_attention.output": "1.EncDecAttention.o",
        "post_attention_norm": f"{mlp}.layer_norm",
        "mlp.fc2": f"{mlp}.DenseReluDense.wo",
    }
    if name in simple:
        found[f"{block}.{simple[name]}.weight"] = value
    elif name == "mlp.fc1":
        parts = [value] if config.glu is None else value.chunk(2)
        for part, its in zip(parts, ["wi"] if config.glu is None else ["wi_0", "wi_1"]):
            found[f"{block}.{mlp}.DenseReluDense.{its}.weight"] = part
    else:
        letters = "qkv" if name == "attention.qkv" else "kv"
        its = "0.SelfAttention" if name == "attention.qkv" else "1.EncDecAttention"
        split = value.view(heads, len(letters), -1, value.shape[1])
        for at, letter in enumerate(letters):
            found[f"{block}.{its}.{letter}.weight"] = split[:, at].flatten(0, 1)
