"""gpt-oss (arXiv 2508.10925): experts in every layer, sinks, and a window in every second one.

All matrices have biases, those of the router and of experts too. Experts are one tensor for a
layer, [experts, in, out], in which the columns of gate and up alternate. The released weights are
quantized (MXFP4), which is refused with what to do; folders that transformers has written since
hold them as numbers.
"""

from megatron.checkpoint.formats.huggingface.families import llama, mixtral
from megatron.checkpoint.formats.huggingface.families.qwen import (
    FULL,
    SLIDING,
    layer_kinds,
    windows_of,
)
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields, read_rope
from megatron.checkpoint.formats.huggingface.layouts import Same, StackInOne, TensorRule
from megatron.config.model import GluActivation, ModelConfig, SoftmaxType
from megatron.json_values import JsonValue

# The defaults of transformers.
_HEAD_WIDTH, _ROTARY_BASE, _EPSILON, _WINDOW = 64, 150000.0, 1e-5, 128


def _read(fields: Fields) -> dict[str, object]:
    fields.get("num_key_value_heads")  # absent would mean 8 there, and as many as heads here
    fields.must_be("attention_bias", True, True, why="biases in the MLP alone")
    fields.must_be("hidden_act", "silu", "silu", why="another gate")
    fields.must_be("swiglu_alpha", 1.702, 1.702, why="another gate")
    if not fields.mapping("rope_parameters"):
        fields.get("rope_scaling")  # absent would mean yarn there
    # Of training alone: a loss of whole micro-batches, and whether to compute it.
    fields.number("router_aux_loss_coef", None)
    fields.boolean("output_router_logits", False)
    # Of the release, beside the same by another name.
    fields.get("experts_per_token", None)
    fields.get("initial_context_length", None)
    layers = range(fields.integer("num_hidden_layers"))
    window = fields.integer("sliding_window", None if fields.has("sliding_window") else _WINDOW)
    kinds = fields.get("layer_types", [FULL if at % 2 else SLIDING for at in layers])
    return llama.read_sizes_of_blocks(fields, head_width=_HEAD_WIDTH) | {
        **read_rope(fields, default=_ROTARY_BASE),
        "layernorm_epsilon": fields.number("rms_norm_eps", _EPSILON),
        "add_bias_linear": True,
        "glu_activation": "quick_geglu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": fields.number("swiglu_limit", 7.0),
        "softmax_type": "learnable",
        "num_experts": fields.integer_of("num_experts", "num_local_experts"),
        "moe_router_topk": fields.integer("num_experts_per_tok", 4),
        "moe_router_add_bias": True,
        **windows_of(fields, kinds, window),
    }


def _write(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    shape = llama.write_shape(config, sizes)
    return shape | {
        "hidden_act": "silu",  # the name that all releases have
        "intermediate_size": config.expert_width,
        "attention_bias": True,
        "swiglu_limit": config.activation_func_clamp_value,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "sliding_window": config.sliding_window or _WINDOW,  # needed there if no layer has it
        "layer_types": [*layer_kinds(config)],
        "rope_scaling": shape["rope_scaling"] or {"rope_type": "default"},
    }


def _tensors() -> dict[str, TensorRule]:
    biased = llama.tensors(qkv_bias=True, other_biases=True)
    experts = "layers.{}.mlp.experts"
    return {
        **{name: rule for name, rule in biased.items() if ".mlp." not in name},
        "layers.{}.attention.sinks": Same("layers.{}.self_attn.sinks"),
        "layers.{}.mlp.router.weight": Same("layers.{}.mlp.router.weight"),
        "layers.{}.mlp.router.bias": Same("layers.{}.mlp.router.bias"),
        f"{experts}.fc1.weight": StackInOne(f"{experts}.gate_up_proj", alternating=True),
        f"{experts}.fc1.bias": StackInOne(f"{experts}.gate_up_proj_bias", alternating=True),
        f"{experts}.fc2.weight": StackInOne(f"{experts}.down_proj"),
        f"{experts}.fc2.bias": Same(f"{experts}.down_proj_bias"),
    }


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    prefix="model.",
    head=("lm_head.weight",),
    supported={
        **{n: v for n, v in mixtral.MIXTRAL.supported.items() if n != "layers_without_window"},
        "glu": (GluActivation.QUICK_GEGLU,),
        "glu_linear_offset": (1.0,),
        "has_plain_unit": (False,),
        "has_bounded_unit": (True,),
        "add_bias_linear": (True,),
        "has_sinks": (True,),
        "softmax_type": (SoftmaxType.LEARNABLE,),
        "moe_router_add_bias": (True,),
    },
    tensors=_tensors(),
    buffers=llama.BUFFERS,
    read_config=_read,
    read_sizes=llama.read_llama_sizes,
    write_config=_write,
    experts=True,
)
