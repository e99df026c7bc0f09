"""Mixtral (arXiv 2401.04088): Mistral with experts, whose gate, up and down are w1, w3 and w2.

Files have three matrices for each expert, of every generation: transformers 5 has them stacked in
memory and takes them apart to save.
"""

from megatron.checkpoint.formats.huggingface.families import llama
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.checkpoint.formats.huggingface.layouts import OfExperts, Same, TensorRule
from megatron.config.experts import MlpType, RouterScoreFunction
from megatron.config.model import ModelConfig
from megatron.json_values import JsonValue

_ROTARY_BASE, _EPSILON = 1e6, 1e-5  # the default of transformers


def _read(fields: Fields) -> dict[str, object]:
    fields.get("num_key_value_heads")  # absent would mean 8 there, and as many as heads here
    fields.must_be("router_jitter_noise", 0.0, 0.0, why="noise on the input of a router")
    # Of training alone: a loss of whole micro-batches, and whether to compute it.
    fields.number("router_aux_loss_coef", None)
    fields.boolean("output_router_logits", False)
    return llama.read_shape(fields, rotary_base=_ROTARY_BASE) | {
        "layernorm_epsilon": fields.number("rms_norm_eps", _EPSILON),
        "sliding_window": fields.integer("sliding_window", None),
        "num_experts": fields.integer("num_local_experts", 8),
        "moe_router_topk": fields.integer("num_experts_per_tok", 2),
    }


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    heads_fill = config.num_attention_heads * config.head_width == config.hidden_size
    return llama.write_shape(config, sizes) | {
        "head_dim": None if heads_fill else config.head_width,
        "intermediate_size": config.expert_width,
        "sliding_window": config.sliding_window,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
    }


def _tensors() -> dict[str, TensorRule]:
    dense = {name: rule for name, rule in llama.tensors().items() if ".mlp." not in name}
    there, experts = "layers.{}.block_sparse_moe", "layers.{}.block_sparse_moe.experts.{expert}"
    return dense | {
        "layers.{}.mlp.router.weight": Same(f"{there}.gate.weight"),
        "layers.{}.mlp.experts.fc1.weight": OfExperts(
            (f"{experts}.w1.weight", f"{experts}.w3.weight")
        ),
        "layers.{}.mlp.experts.fc2.weight": OfExperts((f"{experts}.w2.weight",)),
    }


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported={
        **llama.SUPPORTED,
        "add_bias_linear": (False,),
        "has_qkv_bias_alone": (False,),
        "qk_layernorm": (False,),
        "moe_router_pre_softmax": (False,),
        "moe_router_score_function": (RouterScoreFunction.SOFTMAX,),
        "moe_router_topk_scaling_factor": (1.0,),
        "moe_router_num_groups": (None,),
        "moe_router_enable_expert_bias": (False,),
        "moe_shared_expert_intermediate_size": (None,),
        "mlp_type": (MlpType.STANDARD,),
    },
    tensors=_tensors(),
    buffers=llama.BUFFERS,
    read_config=_read,
    read_sizes=llama.read_llama_sizes,
    write_config=_write,
    experts=True,
)
