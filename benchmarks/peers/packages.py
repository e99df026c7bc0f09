"""What `train_cpu.py --peers` adds: the plain GPT compiled, transformers' and megatron-core's.

Each computes what ours does, from a copy of our weights, and is trained by `PlainTrainer`.
megatron-core is not installed beside this package, whose name it shares: it is imported from a
folder, and its modules for CUDA are replaced where a CPU has nothing of the kind.
"""

import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import megatron
from benchmarks.peers.plain_gpt import (
    LlamaShape,
    PlainGPT,
    Shape,
    copy_parameters,
    copy_weights,
    cross_entropy_of,
    q_k_v,
    q_then_k_then_v,
)
from benchmarks.peers.plain_llama import NORM_EPS, ROTARY_BASE, PlainLlama
from megatron.errors import ConfigError

Named = Iterable[tuple[str, Tensor]]
COMPILED, TRANSFORMERS, MEGATRON_CORE = "compiled", "transformers", "megatron-core"


class Peer(NamedTuple):
    """A model with our weights, and its mean loss of [b, s + 1] tokens."""

    model: nn.Module
    loss: Callable[[Tensor], Tensor]


Maker = Callable[[Named, Shape], Peer]
"""What makes a peer with a copy of our weights."""


def plain(ours: Named, shape: Shape) -> Peer:
    """Return the plain model of the shape's network."""
    model = PlainLlama(shape) if isinstance(shape, LlamaShape) else PlainGPT(shape)
    copy_weights(ours, model, shape)
    return Peer(model, cross_entropy_of(model))


def compiled(ours: Named, shape: Shape) -> Peer:
    """Return the plain model with its loss under `torch.compile`."""
    model, loss = plain(ours, shape)
    return Peer(model, torch.compile(loss))


def transformers(ours: Named, shape: Shape) -> Peer:
    """Return transformers' GPT-2 or Llama with fused attention and its own loss."""
    model = (
        _transformers_llama(ours, shape)
        if isinstance(shape, LlamaShape)
        else _transformers_gpt2(ours, shape)
    )

    def loss(text: Tensor) -> Tensor:
        logits = model(text[:, :-1]).logits
        mean: Tensor = model.loss_function(
            logits=logits,
            labels=None,
            shift_labels=text[:, 1:].contiguous(),
            vocab_size=shape.vocab,
        )
        return mean

    return Peer(model, loss)


def _transformers_gpt2(ours: Named, shape: Shape) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(  # type: ignore[call-arg]  # transformers leaves some untyped
        vocab_size=shape.vocab,
        n_positions=shape.seq_length,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = GPT2LMHeadModel(config)
    words = {
        "embedding": "transformer",
        "word": "wte",
        "position": "wpe",
        "layers": "transformer.h",
        "input_norm": "ln_1",
        "attention": "attn",
        "qkv": "c_attn",
        "output": "c_proj",
        "post_attention_norm": "ln_2",
        "fc1": "c_fc",
        "fc2": "c_proj",
        "final_norm": "transformer.ln_f",
    }

    def as_there(name: str, value: Tensor) -> Tensor:
        value = q_then_k_then_v(shape, name, value)
        # Its linear layers hold [in, out].
        is_linear = name.startswith("layers.") and value.dim() == 2
        return value.t() if is_linear else value

    copy_parameters(ours, model, words, as_there)
    return model


def _transformers_llama(ours: Named, shape: LlamaShape) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(  # type: ignore[call-arg]  # transformers leaves some untyped
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        max_position_embeddings=shape.seq_length,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    words = {
        "embedding": "model",
        "word": "embed_tokens",
        "layers": "model.layers",
        "input_norm": "input_layernorm",
        "attention": "self_attn",
        "post_attention_norm": "post_attention_layernorm",
        "fc2": "down_proj",
        "final_norm": "model.norm",
        "output": "lm_head",
    }
    copy_parameters(_llama_apart(ours, shape), model, words, lambda name, value: value)
    return model


def _llama_apart(ours: Named, shape: LlamaShape) -> Named:
    """Yield our parameters with one for each matrix that transformers has, under its name."""
    for name, value in ours:
        if ".qkv." in name:
            for letter, part in zip("qkv", q_k_v(shape, value)):
                yield name.replace("qkv", f"{letter}_proj"), part
        elif ".fc1." in name:
            for which, part in zip(("gate", "up"), value.chunk(2)):
                yield name.replace("fc1", f"{which}_proj"), part
        else:  # `output` alone is the head
            yield name.replace("attention.output", "attention.o_proj"), value


def megatron_core(folder: Path) -> Maker:
    """Return the maker of megatron-core's GPT with fused attention, from `folder`/megatron/core."""
    if not (folder / "megatron" / "core" / "__init__.py").is_file():
        raise ConfigError(
            "there is no megatron-core in this folder",
            found=f"--megatron-core {folder}",
            fix=f"pip install --no-deps --target {folder} megatron-core==0.16.1",
        )

    def make(ours: Named, shape: Shape) -> Peer:
        if not hasattr(typing, "override"):  # of Python 3.12
            typing.override = lambda method: method  # type: ignore[attr-defined]
        if str(folder / "megatron") not in megatron.__path__:
            megatron.__path__.append(str(folder / "megatron"))
        with _cpu_as_device():
            model = _megatron_core_model(shape)
        words = {
            "word": "word_embeddings",
            "position": "position_embeddings",
            "layers": "decoder.layers",
            "input_norm": "input_layernorm",
            "attention": "self_attention",
            "qkv": "linear_qkv",
            "output": "output_layer",
            "post_attention_norm": "pre_mlp_layernorm",
            "fc1": "linear_fc1",
            "fc2": "linear_fc2",
            "final_norm": "decoder.final_layernorm",
        }
        # `output` alone is the head.
        named = ((name.replace("attention.output", "attention.linear_proj"), w) for name, w in ours)
        copy_parameters(named, model, words, lambda name, value: value)
        places = torch.arange(shape.seq_length).expand(shape.micro_batch, -1)

        def loss(text: Tensor) -> Tensor:
            with _cpu_as_device():
                losses: Tensor = model(text[:, :-1], places, None, labels=text[:, 1:].contiguous())
            return losses.mean()

        return Peer(model, loss)

    return make


def _cpu_as_device() -> Any:
    return patch.object(torch.cuda, "current_device", lambda: "cpu")


def _megatron_core_model(shape: Shape) -> nn.Module:
    from importlib import import_module

    core = "megatron.core"
    groups = import_module(f"{core}.parallel_state")
    groups.destroy_model_parallel()  # of the dtype before
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            store=dist.HashStore(),  # type: ignore[attr-defined]  # documented
            rank=0,
            world_size=1,
        )
    groups.initialize_model_parallel()
    of_llama: dict[str, Any] = {}
    if isinstance(shape, LlamaShape):
        of_llama = {
            "num_query_groups": shape.groups,
            "ffn_hidden_size": shape.ffn,
            "normalization": "RMSNorm",
            "layernorm_epsilon": NORM_EPS,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
        }
    config = import_module(f"{core}.transformer.transformer_config").TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        **of_llama,
    )
    spec = import_module(f"{core}.models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(
        normalization=config.normalization
    )
    spec.submodules.self_attention.submodules.core_attention = _FusedAttention
    model: nn.Module = import_module(f"{core}.models.gpt.gpt_model").GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.vocab,
        max_sequence_length=shape.seq_length,
        share_embeddings_and_output_weights=not of_llama,
        position_embedding_type="rope" if of_llama else "learned_absolute",
        rotary_base=int(ROTARY_BASE),
    )
    return model


class _FusedAttention(nn.Module):
    """Causal attention by torch's kernel, in the place of megatron-core's products and softmax.

    Queries may stand in groups, of which each has one head of keys and values.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Map [s, b, heads, width] and two [s, b, groups, width] to [s, b, heads * width]."""
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        output = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return output.permute(2, 0, 1, 3).flatten(2)
