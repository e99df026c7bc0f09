"""Mistral (arXiv 2310.06825): LLaMA with grouped queries and, in its first release, a window."""

from megatron.checkpoint.formats.huggingface.families import llama
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.model import ModelConfig
from megatron.json_values import JsonValue

_WINDOW = 4096


def _read(fields: Fields) -> dict[str, object]:
    fields.get("num_key_value_heads")  # absent would mean 8 there, and as many as heads here
    # null (from v0.2 on) is no window, and absent is what transformers takes it to be.
    default = None if fields.has("sliding_window") else _WINDOW
    return llama.read_shape(fields) | {"sliding_window": fields.integer("sliding_window", default)}


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    return llama.write_shape(config, sizes) | {"sliding_window": config.sliding_window}


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported={
        **llama.SUPPORTED,
        "add_bias_linear": (False,),
        "has_qkv_bias_alone": (False,),
        "qk_layernorm": (False,),
    },
    tensors=llama.tensors(),
    buffers=llama.BUFFERS,
    read_config=_read,
    read_sizes=llama.read_llama_sizes,
    write_config=_write,
)
