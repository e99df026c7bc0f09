"""Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671), Qwen3-MoE (arXiv 2505.09388).

They are Qwen2 and Qwen3 with experts in some or all layers, and the former with a shared expert
behind a gate. Files have three matrices for each expert, as Mixtral's have.
"""

from collections.abc import Mapping

from megatron.checkpoint.formats.huggingface.families import llama
from megatron.checkpoint.formats.huggingface.families.mixtral import MIXTRAL
from megatron.checkpoint.formats.huggingface.families.qwen import read_windows
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.checkpoint.formats.huggingface.layouts import (
    OfExperts,
    Same,
    Stacked,
    TensorRule,
)
from megatron.config.model import ModelConfig
from megatron.json_values import JsonValue


def _read(fields: Fields) -> dict[str, object]:
    """Return the fields that both spell alike."""
    fields.get("num_key_value_heads")  # absent would mean another number there than here
    fields.must_be("use_sliding_window", False, False, why="a window in some layers")
    read_windows(fields)
    # Of training alone: a loss of whole micro-batches, and whether to compute it.
    fields.number("router_aux_loss_coef", None)
    fields.boolean("output_router_logits", False)
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    layers = range(fields.integer("num_hidden_layers"))
    has_experts = [int(at not in dense and (at + 1) % step == 0) for at in layers]
    # An old spelling, which transformers still reads; 5 writes the other one of Qwen3-MoE.
    experts = fields.integer("num_experts", None) or fields.integer("num_local_experts")
    return llama.read_shape(fields) | {
        "num_experts": experts,
        "moe_router_topk": fields.integer("num_experts_per_tok"),
        "moe_ffn_hidden_size": fields.integer("moe_intermediate_size"),
        "moe_router_pre_softmax": not fields.boolean("norm_topk_prob", False),
        **({} if all(has_experts) else {"moe_layer_freq": str(has_experts)}),
    }


def _read_qwen2(fields: Fields) -> dict[str, object]:
    fields.must_be("qkv_bias", True, True, why="no biases in attention")
    return _read(fields) | {
        "add_qkv_bias": True,
        "moe_shared_expert_intermediate_size": fields.integer("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


def _read_qwen3(fields: Fields) -> dict[str, object]:
    fields.must_be("attention_bias", False, False, why="biases in attention alone")
    return _read(fields) | {"qk_layernorm": True}


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    return llama.write_shape(config, sizes) | {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "moe_intermediate_size": config.expert_width,
        "norm_topk_prob": not config.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [at for at, has in enumerate(config.expert_layers) if not has],
        "use_sliding_window": False,
    }


def _write_qwen2(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    fields = _write(config, sizes)
    del fields["head_dim"]  # transformers shares the hidden size out, as in Qwen2
    shared = config.moe_shared_expert_intermediate_size
    return fields | {"qkv_bias": True, "shared_expert_intermediate_size": shared}


def _write_qwen3(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    return _write(config, sizes) | {"attention_bias": False}


def _experts(there: str) -> Mapping[str, TensorRule]:
    """Return the rules of a layer's router and experts, at `there` in files."""
    gate, up, down = (f"{there}.experts.{{expert}}.{n}_proj.weight" for n in ("gate", "up", "down"))
    return {
        "layers.{}.mlp.router.weight": Same(f"{there}.gate.weight"),
        "layers.{}.mlp.experts.fc1.weight": OfExperts((gate, up)),
        "layers.{}.mlp.experts.fc2.weight": OfExperts((down,)),
    }


def _shared_expert(there: str) -> Mapping[str, TensorRule]:
    gate, up, down = (f"{there}.shared_expert.{n}_proj.weight" for n in ("gate", "up", "down"))
    return {
        "layers.{}.mlp.shared_expert.gate": Same(f"{there}.shared_expert_gate.weight"),
        "layers.{}.mlp.shared_expert.fc1.weight": Stacked((gate, up)),
        "layers.{}.mlp.shared_expert.fc2.weight": Same(down),
    }


_MLP = "layers.{}.mlp"
# What Mixtral's have of a router, these have too, but for shares that may be left as they are.
_SUPPORTED = {
    **MIXTRAL.supported,
    "moe_router_pre_softmax": (False, True),
    "sliding_window": (None,),
}

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported={
        **{n: v for n, v in _SUPPORTED.items() if n != "moe_shared_expert_intermediate_size"},
        "has_qkv_bias_alone": (True,),
        "kv_channels": (None,),
        "moe_shared_expert_gate": (True,),
    },
    tensors={**llama.tensors(qkv_bias=True), **_experts(_MLP), **_shared_expert(_MLP)},
    buffers=llama.BUFFERS,
    read_config=_read_qwen2,
    read_sizes=llama.read_llama_sizes,
    write_config=_write_qwen2,
    experts=True,
    dense_layers=True,
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported={**_SUPPORTED, "qk_layernorm": (True,)},
    tensors={**llama.tensors(qk_norm=True), **_experts(_MLP)},
    buffers=llama.BUFFERS,
    read_config=_read_qwen3,
    read_sizes=llama.read_llama_sizes,
    write_config=_write_qwen3,
    experts=True,
    dense_layers=True,
)
