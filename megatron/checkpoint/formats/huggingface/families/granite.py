"""Granite 3 (IBM 2024): LLaMA with four fixed numbers, of embedding, branches, scores and logits.

What a reader would get wrong: `attention_multiplier` stands in place of 1 / sqrt(width of a head),
and is 1 where config.json has none; `logits_scaling` divides.
"""

from megatron.checkpoint.formats.huggingface.families import llama
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.model import ModelConfig
from megatron.json_values import JsonValue

# Theirs to ours.
_FACTORS = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention_multiplier": "softmax_scale",
    "logits_scaling": "logit_divisor",
}


def _read(fields: Fields) -> dict[str, object]:
    factors = {ours: fields.number(there, 1.0) for there, ours in _FACTORS.items()}
    return llama.read_shape(fields) | llama.read_biases(fields) | factors


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    bias = config.add_bias_linear
    return llama.write_shape(config, sizes) | {
        "attention_bias": bias,
        "mlp_bias": bias,
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "attention_multiplier": config.score_scale,
        "logits_scaling": config.logit_divisor,
    }


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported=llama.LLAMA.supported,
    free=tuple(_FACTORS.values()),
    tensors=llama.LLAMA.tensors,
    buffers=llama.BUFFERS,
    read_config=_read,
    read_sizes=llama.read_llama_sizes,
    write_config=_write,
)
