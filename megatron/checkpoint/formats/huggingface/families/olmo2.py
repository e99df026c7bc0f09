"""OLMo 2 (arXiv 2501.00656): LLaMA whose norms stand after attention and MLP.

Queries and keys are normalised too, over all heads of a token together. OLMo 3 is the same network
with windows in some layers.
"""

from megatron.checkpoint.formats.huggingface.families import llama
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.checkpoint.formats.huggingface.layouts import Same, TensorRule
from megatron.config.blocks import NormPlacement, QkNormScope
from megatron.config.model import ModelConfig
from megatron.json_values import JsonValue

_EPSILON = 1e-5  # the default of transformers


def _read(fields: Fields) -> dict[str, object]:
    fields.must_be("attention_bias", False, False, why="biases in attention alone")
    return llama.read_shape(fields) | {
        "layernorm_epsilon": fields.number("rms_norm_eps", _EPSILON),
        "norm_placement": "after",
        "qk_layernorm": True,
        "qk_layernorm_scope": "all-heads",
    }


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    # A token of padding that is absent would be one of the release, of its vocabulary.
    return llama.write_shape(config, sizes) | {"attention_bias": False, "pad_token_id": None}


def _tensors() -> dict[str, TensorRule]:
    before = ("layers.{}.input_norm.", "layers.{}.post_attention_norm.")
    return {
        **{n: r for n, r in llama.tensors(qk_norm=True).items() if not n.startswith(before)},
        "layers.{}.attention_output_norm.weight": Same("layers.{}.post_attention_layernorm.weight"),
        "layers.{}.mlp_output_norm.weight": Same("layers.{}.post_feedforward_layernorm.weight"),
    }


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported={
        **llama.SUPPORTED,
        "add_bias_linear": (False,),
        "has_qkv_bias_alone": (False,),
        "qk_layernorm": (True,),
        "qk_layernorm_scope": (QkNormScope.ALL_HEADS,),
        "norm_placement": (NormPlacement.AFTER,),
        "sliding_window": (None,),
    },
    tensors=_tensors(),
    buffers=llama.BUFFERS,
    read_config=_read,
    read_sizes=llama.read_llama_sizes,
    write_config=_write,
)
