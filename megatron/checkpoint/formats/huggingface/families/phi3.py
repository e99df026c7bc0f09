"""Phi-3 (arXiv 2404.14219), Phi-4 and Phi-4-mini: LLaMA with two matrices where it has five.

q, k and v are one matrix, and so are gate and up. Part of a head may rotate. Releases for long
contexts have two sets of frequencies (`longrope`), which no model here computes.
"""

from megatron.checkpoint.formats.huggingface.families import llama
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields, read_rotary_share
from megatron.checkpoint.formats.huggingface.layouts import QkvBlocks, Same
from megatron.config.model import ModelConfig, RopeType
from megatron.json_values import JsonValue

_EPSILON = 1e-5  # the default of transformers


def _read(fields: Fields) -> dict[str, object]:
    fields.must_be("attention_bias", False, False, why="biases in attention alone")
    fields.get("original_max_position_embeddings", None)  # read there with longrope alone
    return llama.read_shape(fields) | {
        "layernorm_epsilon": fields.number("rms_norm_eps", _EPSILON),
        "hidden_dropout": fields.number("resid_pdrop", 0.0),
        "rotary_percent": read_rotary_share(fields, "partial_rotary_factor", 1.0),
        "sliding_window": fields.integer("sliding_window", None),
    }


def _sizes(fields: Fields) -> Sizes:
    fields.get("embd_pdrop", None)  # there is one dropout of hidden states here: resid_pdrop
    return llama.read_llama_sizes(fields)


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    return llama.write_shape(config, sizes) | {
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "pad_token_id": None,  # absent would be a token of the release, of its vocabulary
        "partial_rotary_factor": config.rotary_percent,
        "sliding_window": config.sliding_window,
    }


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported={
        **{name: v for name, v in llama.SUPPORTED.items() if name != "rotary_percent"},
        "rotary_seq_len_interpolation_factor": (None,),
        "use_rope_scaling": (False,),
        "rope_type": (RopeType.ROPE,),
        "add_bias_linear": (False,),
        "has_qkv_bias_alone": (False,),
        "qk_layernorm": (False,),
    },
    tensors={
        **llama.tensors(),
        "layers.{}.attention.qkv.weight": QkvBlocks("layers.{}.self_attn.qkv_proj.weight"),
        "layers.{}.mlp.fc1.weight": Same("layers.{}.mlp.gate_up_proj.weight"),
    },
    buffers=llama.BUFFERS,
    read_config=_read,
    read_sizes=_sizes,
    write_config=_write,
)
