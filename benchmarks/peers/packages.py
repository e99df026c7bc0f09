"""What `train_cpu.py --peers` adds: the plain GPT compiled, transformers' and megatron-core's.

Each computes what ours does, from a copy of our weights, and is trained by `PlainTrainer`.
megatron-core is not installed beside this package, whose name it shares: it is imported from a
folder, and its modules for CUDA are replaced where a CPU has nothing of the kind.
"""

import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import megatron
from benchmarks.peers.plain_gpt import (
    PlainGPT,
    Shape,
    copy_parameters,
    copy_weights,
    cross_entropy_of,
    q_then_k_then_v,
)
from megatron.errors import ConfigError

Named = Iterable[tuple[str, Tensor]]
COMPILED, TRANSFORMERS, MEGATRON_CORE = "compiled", "transformers", "megatron-core"


@dataclass(frozen=True)
class Peer:
    """A model with our weights, and its mean loss of [b, s + 1] tokens."""

    model: nn.Module
    loss: Callable[[Tensor], Tensor]


Maker = Callable[[Named, Shape], Peer]
"""What makes a peer with a copy of our weights."""


def compiled(ours: Named, shape: Shape) -> Peer:
    """Return the plain GPT with its loss under `torch.compile`."""
    model = PlainGPT(shape)
    copy_weights(ours, model, shape)
    return Peer(model, torch.compile(cross_entropy_of(model)))


def transformers(ours: Named, shape: Shape) -> Peer:
    """Return transformers' GPT-2 with fused attention and its own loss."""
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
            "output": "linear_proj",
            "post_attention_norm": "pre_mlp_layernorm",
            "fc1": "linear_fc1",
            "fc2": "linear_fc2",
            "final_norm": "decoder.final_layernorm",
        }
        copy_parameters(ours, model, words, lambda name, value: value)
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
    )
    spec = import_module(f"{core}.models.gpt.gpt_layer_specs").get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = _FusedAttention
    model: nn.Module = import_module(f"{core}.models.gpt.gpt_model").GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.vocab,
        max_sequence_length=shape.seq_length,
        share_embeddings_and_output_weights=True,
    )
    return model


class _FusedAttention(nn.Module):
    """Causal attention by torch's kernel, in the place of megatron-core's products and softmax."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Map three [s, b, heads, width] to [s, b, heads * width]."""
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return output.permute(2, 0, 1, 3).flatten(2)
