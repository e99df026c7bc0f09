"""Tiny Hugging Face models for tests, with weights in which every value counts.

What a reader would get wrong: as `transformers` begins a model, biases are zero, norms are one and
matrices so small that an activation is nearly linear; a wrong GELU or a swapped half would hide.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from megatron.checkpoint.boxes import whole
from megatron.checkpoint.source import CheckpointSource
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import ModelBuild, VocabSize
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

VOCABULARY, POSITIONS = 53, 64
# In float32 both sides round a few hundred additions in another order. Logits are of size 1 to 10.
LOGITS = 1e-5

_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": POSITIONS,
}
_FALCON = {
    **{name: value for name, value in _SHAPE.items() if name != "intermediate_size"},
    "new_decoder_architecture": True,
}
_OPT = {
    **{name: value for name, value in _SHAPE.items() if name != "intermediate_size"},
    "pad_token_id": 0,
}
_EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA = {
    **_SHAPE,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "sliding_window": 6,
    "pad_token_id": 0,
}
_QWEN_EXPERTS = {
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# Name of the case: class of its config, and fields. Each feature of a family is in one of them.
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {**_GPT2, "n_inner": 72}),
    "gpt2, erf, untied": (
        "GPT2Config",
        {**_GPT2, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "gpt_neox": ("GPTNeoXConfig", {**_SHAPE, "rotary_pct": 0.5}),
    "gpt_neox, one after the other": (
        "GPTNeoXConfig",
        {
            **_SHAPE,
            "use_parallel_residual": False,
            "hidden_act": "gelu_fast",
            "tie_word_embeddings": True,
        },
    ),
    "bloom": ("BloomConfig", _BLOOM),
    "bloom, residual after the norm, 6 heads, untied": (
        "BloomConfig",
        {
            **_BLOOM,
            "hidden_size": 48,
            "n_head": 6,
            "apply_residual_connection_post_layernorm": True,
            "tie_word_embeddings": False,
        },
    ),
    "falcon": ("FalconConfig", {**_FALCON, "num_kv_heads": 2, "ffn_hidden_size": 56}),
    "falcon, biases, untied": (
        "FalconConfig",
        {**_FALCON, "bias": True, "activation": "gelu_new", "tie_word_embeddings": False},
    ),
    "llama": ("LlamaConfig", _SHAPE),
    "llama 3.1": (
        "LlamaConfig",
        {
            **_SHAPE,
            "num_key_value_heads": 2,
            "rope_theta": 500.0,
            "rope_scaling": _LLAMA3,
            "tie_word_embeddings": True,
        },
    ),
    "llama, biases, wide heads": (
        "LlamaConfig",
        {
            **_SHAPE,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "llama, yarn": (
        "LlamaConfig",
        {
            **_SHAPE,
            "head_dim": 16,
            "rope_theta": 500.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "truncate": True,
                "original_max_position_embeddings": 32,
                "mscale": 0.8,
                "mscale_all_dim": 0.5,
            },
        },
    ),
    "mistral": ("MistralConfig", {**_SHAPE, "num_key_value_heads": 2, "sliding_window": 6}),
    "phi3": ("Phi3Config", {**_SHAPE, "num_key_value_heads": 2, "pad_token_id": 0}),
    "phi3, window, half rotates, tied": (
        "Phi3Config",
        {
            **_SHAPE,
            "pad_token_id": 0,
            "sliding_window": 6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": ("Qwen2Config", {**_SHAPE, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2, window in the second layer": (
        "Qwen2Config",
        {
            **_SHAPE,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3Config", {**_SHAPE, "num_key_value_heads": 2, "head_dim": 16}),
    "smollm3": (
        "SmolLM3Config",
        {
            **_SHAPE,
            "num_key_value_heads": 2,
            "no_rope_layers": [1, 0],
            "rope_theta": 500.0,
            "pad_token_id": 0,
        },
    ),
    "smollm3, biases, the first does not rotate, untied": (
        "SmolLM3Config",
        {
            **_SHAPE,
            "num_key_value_heads": 2,
            "no_rope_layers": [0, 1],
            "rope_theta": 500.0,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
        },
    ),
    "olmo2": ("Olmo2Config", {**_SHAPE, "num_key_value_heads": 2, "pad_token_id": 0}),
    "olmo2, wide heads, tied": (
        "Olmo2Config",
        {**_SHAPE, "head_dim": 12, "pad_token_id": 0, "tie_word_embeddings": True},
    ),
    "granite": (
        "GraniteConfig",
        {
            **_SHAPE,
            "num_key_value_heads": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.5,
            "tie_word_embeddings": True,
        },
    ),
    "granite, biases, untied": (
        "GraniteConfig",
        {
            **_SHAPE,
            "attention_bias": True,
            "mlp_bias": True,
            "attention_multiplier": 0.3,  # larger scores would multiply rounding
            "logits_scaling": 1.25,
        },
    ),
    "opt": ("OPTConfig", {**_OPT, "ffn_dim": 72}),
    "opt, as Galactica, untied": (
        "OPTConfig",
        {
            **_OPT,
            "ffn_dim": 56,
            "enable_bias": False,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": ("MixtralConfig", {**_SHAPE, **_EXPERTS}),
    "mixtral, window, 3 of 5, tied": (
        "MixtralConfig",
        {
            **_SHAPE,
            **_EXPERTS,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 6,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_SHAPE,
            **_EXPERTS,
            "head_dim": 16,
            "sliding_window": 6,
            "swiglu_limit": 0.8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "gpt_oss, no yarn, all layers alike, tied": (
        "GptOssConfig",
        {
            **_SHAPE,
            **_EXPERTS,
            "head_dim": 8,
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            **_GEMMA,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 6,
        },
    ),
    "gemma2, without caps, erf, untied": (
        "Gemma2Config",
        {
            **_GEMMA,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "hidden_activation": "gelu",
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            **_GEMMA,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 10,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "gemma3_text, no windows, a cap": (
        "Gemma3TextConfig",
        {
            **_GEMMA,
            "layer_types": ["full_attention"] * 3,
            "sliding_window": 4096,
            "final_logit_softcapping": 3.0,
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **_SHAPE,
            **_QWEN_EXPERTS,
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen2_moe, shares of sum 1": (
        "Qwen2MoeConfig",
        {
            **_SHAPE,
            **_QWEN_EXPERTS,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_SHAPE,
            **_QWEN_EXPERTS,
            "mlp_only_layers": [0],
            "head_dim": 16,
            "norm_topk_prob": True,
        },
    ),
}


def hf_model(case: str, **changes: Any) -> Any:
    """The model of a case in float32, in evaluation mode; the same values every time."""
    kind, fields = CASES[case]
    config = getattr(transformers, kind)(**(fields | changes))
    # Eager: the window of a fused kernel is another piece of code.
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.3 if parameter.dim() == 1 or "emb" in name or "wte" in name else 0.2
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
            if "weight" in name and parameter.dim() == 1:  # a norm
                if "gemma" in case:  # which adds 1 itself; without rounding, there and back
                    parameter.mul_(2**12).round_().div_(2**12)
                else:
                    parameter.add_(1.0)
            if "decoder.embed_positions" in name:
                parameter[:2] = 0.0  # no position of OPT's stands there, and exports have zeros
    return model.eval()


@functools.cache
def saved_logits(case: str) -> Tensor:
    """What `transformers` computes for `tokens()`, [b, s, v]."""
    with torch.no_grad():
        logits: Tensor = hf_model(case)(tokens()).logits
        return logits


def save_case(case: str, folder: Path, **options: Any) -> Path:
    """Save the model of a case with transformers' own `save_pretrained`."""
    hf_model(case).save_pretrained(folder, **options)
    return folder


def tokens(batch: int = 2, length: int = 20) -> Tensor:
    """Random ids [b, s]."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)


def our_build(**changes: Any) -> ModelBuild:
    """float32 on one process."""
    values: dict[str, Any] = {
        "ctx": ParallelContext.single(),
        "vocab": VocabSize(VOCABULARY, VOCABULARY),
        "seq_length": POSITIONS,
        "streams": RandomStreams(1),
        "precision": PrecisionConfig(),
    }
    return ModelBuild(**(values | changes))


def our_model(
    source: CheckpointSource, change: Callable[[str, Tensor], Tensor] | None = None
) -> GPTModel:
    """Our GPT with the weights of a source, after what `change` does to them by name."""
    model = GPTModel(from_plain(ModelConfig, source.config["model"]), our_build())
    state = {
        name.removeprefix("model/"): source.read(name, whole(description.global_shape))
        for name, description in source.tensors.items()
    }
    if change is not None:
        state = {name: change(name, tensor) for name, tensor in state.items()}
    model.load_state_dict(state)
    return model.eval()


def our_logits(model: GPTModel) -> Tensor:
    """[b, s, v] for `tokens()`."""
    with torch.no_grad():
        logits = model(tokens())
    assert isinstance(logits, Tensor)
    return logits.transpose(0, 1)
