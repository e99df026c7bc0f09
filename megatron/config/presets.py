"""Named model shapes for `--model-preset`: a table, and nothing else.

A flag on the command line wins over the preset. Shapes are those of the published models: GPT-2
(Radford et al. 2019), GPT-3 (arXiv 2005.14165, table 2.1), LLaMA (arXiv 2302.13971), Llama 2 and 3
(arXiv 2307.09288, 2407.21783), Mixtral (arXiv 2401.04088, table 1), T5 (arXiv 1910.10683, section
3.7), T5 1.1 (the configs of its release) and ViT (arXiv 2010.11929, table 1; tiny and small: arXiv
2012.12877, table 1). Models whose blocks differ in more than shape are not in it.
"""

from collections.abc import Mapping
from types import MappingProxyType

from megatron.config.model import GluActivation, Normalization, PositionEmbedding

Preset = Mapping[str, object]


def _gpt(layers: int, hidden: int, heads: int, seq_length: int = 2048) -> Preset:
    return MappingProxyType(
        {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "seq_length": seq_length,
            "max_position_embeddings": seq_length,
        }
    )


def _llama(layers: int, hidden: int, heads: int, ffn: int, **more: object) -> Preset:
    return MappingProxyType(
        {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "ffn_hidden_size": ffn,
            "seq_length": 2048,
            "position_embedding_type": PositionEmbedding.ROPE,
            "normalization": Normalization.RMS_NORM,
            "swiglu": True,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **more,
        }
    )


def _vit(hidden: int, heads: int) -> Preset:
    return MappingProxyType(
        {
            "num_layers": 12,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "seq_length": 197,  # of 224 x 224 pixels in patches of 16, and the class token
            "patch_dim": 16,
            "onnx_safe": True,
        }
    )


def _t5(layers: int, hidden: int, heads: int, ffn: int, **more: object) -> Preset:
    return MappingProxyType(
        {
            "num_layers": layers,  # of the encoder, and as many of the decoder
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "ffn_hidden_size": ffn,
            "kv_channels": 64,
            "seq_length": 512,
            "position_embedding_type": PositionEmbedding.RELATIVE,
            "softmax_scale": 1.0,
            "normalization": Normalization.RMS_NORM,
            "layernorm_epsilon": 1e-6,
            "add_bias_linear": False,
            **more,
        }
    )


def _t5_1_0(layers: int, hidden: int, heads: int) -> Preset:
    # The head is the table of words, and reads hidden states over sqrt(hidden).
    return _t5(layers, hidden, heads, 4 * hidden, relu=True, logit_divisor=hidden**0.5)


def _t5_1_1(layers: int, hidden: int, heads: int, ffn: int) -> Preset:
    return _t5(
        layers,
        hidden,
        heads,
        ffn,
        glu_activation=GluActivation.GEGLU_TANH,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "gpt2-small": _gpt(12, 768, 12, 1024),
        "gpt2-medium": _gpt(24, 1024, 16, 1024),
        "gpt2-large": _gpt(36, 1280, 20, 1024),
        "gpt2-xl": _gpt(48, 1600, 25, 1024),
        "gpt3-125m": _gpt(12, 768, 12),
        "gpt3-350m": _gpt(24, 1024, 16),
        "gpt3-760m": _gpt(24, 1536, 16),
        "gpt3-1.3b": _gpt(24, 2048, 16),  # the paper prints 24 heads of 128, which is 3072 wide
        "gpt3-6.7b": _gpt(32, 4096, 32),
        "gpt3-175b": _gpt(96, 12288, 96),
        "llama-7b": _llama(32, 4096, 32, 11008, layernorm_epsilon=1e-6),
        "llama-13b": _llama(40, 5120, 40, 13824, layernorm_epsilon=1e-6),
        "llama-65b": _llama(80, 8192, 64, 22016),
        "llama2-7b": _llama(32, 4096, 32, 11008, seq_length=4096),
        "llama2-70b": _llama(80, 8192, 64, 28672, seq_length=4096, num_query_groups=8),
        "llama3-8b": _llama(
            32, 4096, 32, 14336, seq_length=8192, num_query_groups=8, rotary_base=500000.0
        ),
        "llama3-70b": _llama(
            80, 8192, 64, 28672, seq_length=8192, num_query_groups=8, rotary_base=500000.0
        ),
        "t5-small": _t5_1_0(6, 512, 8),
        "t5-base": _t5_1_0(12, 768, 12),
        "t5-large": _t5_1_0(24, 1024, 16),
        "t5-1.1-small": _t5_1_1(8, 512, 6, 1024),
        "t5-1.1-base": _t5_1_1(12, 768, 12, 2048),
        "t5-1.1-large": _t5_1_1(24, 1024, 16, 2816),
        "mixtral-8x7b": _llama(
            32,
            4096,
            32,
            14336,
            seq_length=32768,
            num_query_groups=8,
            rotary_base=1e6,
            num_experts=8,
            moe_router_topk=2,
        ),
        "vit-tiny": _vit(192, 3),
        "vit-small": _vit(384, 6),
        "vit-base": _vit(768, 12),
    }
)
