"""Small models with the parameter names of Megatron-DeepSpeed, trained by DeepSpeed itself.

Written from what is known of its files; none of its code is here. The plain model is our own GPT
under other names. The pipeline is not a GPT, but has the list, the names and the ties of one.
"""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.precision import PrecisionConfig
from megatron.engine.deepspeed.grid import DeepSpeedGrid, mark_tensor_parallel
from megatron.engine.deepspeed.start import start_deepspeed
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.checkpoints.deepspeed_folders import (
    DEADLINE_S,
    SEQUENCE,
    STEPS,
    Case,
    Local,
    held_by,
)
from tests.support.models import TINY_VOCAB, tiny_build, tiny_config, tiny_model
from tests.support.ranks import run_on_ranks

HIDDEN, LAYERS, TOKENS = 8, 2, 20

_BLOCK = {
    "input_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.output": "self_attention.dense",
    "post_attention_norm": "post_attention_layernorm",
    "mlp.fc1": "mlp.dense_h_to_4h",
    "mlp.fc2": "mlp.dense_4h_to_h",
}


def their_name(ours: str) -> str:
    """The name of a parameter of ours in Megatron-DeepSpeed's plain GPT."""
    module, _, leaf = ours.rpartition(".")
    if module.startswith("layers."):
        _, number, part = module.split(".", 2)
        return f"language_model.encoder.layers.{number}.{_BLOCK[part]}.{leaf}"
    fixed = {
        "embedding.word": "embedding.word_embeddings",
        "embedding.position": "embedding.position_embeddings",
        "embedding.norm": "embedding.word_embeddings.norm",
        "final_norm": "encoder.final_layernorm",
    }
    return f"language_model.{fixed[module]}.{leaf}"


class Renamed(nn.Module):
    """A model whose parameters lie under other names."""

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        self._hidden = [model]  # in a list, so that its own names are not registered
        for name, parameter in model.named_parameters():
            *path, leaf = their_name(name).split(".")
            node: nn.Module = self
            for part in path:
                if part not in node._modules:
                    node.add_module(part, nn.Module())
                node = node.get_submodule(part)
            node.register_parameter(leaf, parameter)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = self._hidden[0](tokens, labels=labels)
        mean: Tensor = loss.total / loss.count
        return mean


def write_plain(
    folder: Path, *, stage: int, tp: int, version: float, flags: dict[str, Any]
) -> list[dict[str, Local]]:
    """Train and save the plain model; what each tensor-parallel rank held, by our names."""
    return run_on_ranks(
        tp, _plain, str(folder), stage, tp, version, flags, timeout_s=DEADLINE_S, deepspeed=True
    )


def _plain(
    folder: str, stage: int, tp: int, version: float, flags: dict[str, Any]
) -> dict[str, Local]:
    os.environ["LOCAL_RANK"] = "0"
    ctx = ParallelContext.build(Topology(tp=tp))
    deepspeed = start_deepspeed(ctx)
    gated = {"glu_activation": "geglu", "ffn_hidden_size": 24} if flags.get("glu") else {}
    model = tiny_model(
        tiny_config(embed_layernorm=True, **gated), tiny_build(ctx, precision=PrecisionConfig())
    )
    mark_tensor_parallel(model.parameters())
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    engine, *_ = deepspeed.initialize(
        model=Renamed(model),
        optimizer=torch.optim.AdamW([{"params": decayed}, {"params": rest}], lr=0.01),
        config=_json(stage),
        mpu=DeepSpeedGrid(ctx),
    )
    tokens = torch.arange(SEQUENCE).view(1, SEQUENCE)
    for _ in range(STEPS):
        engine.backward(engine(tokens, labels=tokens + 1))
        engine.step()
    args = Namespace(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=24 if gated else 64,
        glu_activation=gated.get("glu_activation"),
        max_position_embeddings=SEQUENCE,
        seq_length=SEQUENCE,
        embed_layernorm=True,
        position_embedding_type="absolute",
        padded_vocab_size=TINY_VOCAB.padded,
        consumed_train_samples=77,
        consumed_valid_samples=5,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=1,
    )
    info = {"padded_vocab_size": TINY_VOCAB.padded, "original_vocab_size": TINY_VOCAB.true}
    state = {"args": args, "checkpoint_version": version, "iteration": 9, "tokens": 924}
    engine.save_checkpoint(folder, client_state={**state, "checkpoint_info": info})
    return held_by(engine, model, Case(stage=stage))


class Piped(NamedTuple):
    """What one stage of the pipeline held of fp32 weights and moments, by DeepSpeed's names."""

    values: dict[str, dict[str, Tensor]]


def write_piped(folder: Path, *, pp: int, dp: int, first_is_function: bool) -> list[Piped]:
    """Train and save the pipeline; what each stage held.

    Args:
        first_is_function: bigscience's list, where block 0 is layer 3; else block 0 is layer 2.
    """
    ranks = run_on_ranks(
        pp * dp, _piped, str(folder), pp, dp, first_is_function, timeout_s=DEADLINE_S,
        deepspeed=True,
    )  # fmt: skip
    return ranks[::dp]


class EmbeddingPipe(nn.Module):
    """A table that is shared, and one that is not although it lies in the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(TOKENS, HIDDEN)
        self.position_embeddings = nn.Embedding(SEQUENCE, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1])
        out: Tensor = self.word_embeddings(tokens) + self.position_embeddings(positions)
        return out


class BlockPipe(nn.Module):
    """The parameters of a transformer block, all of them used."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.self_attention = nn.Module()
        self.self_attention.query_key_value = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.self_attention.dense = nn.Linear(HIDDEN, HIDDEN)
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Module()
        self.mlp.dense_h_to_4h = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.mlp.dense_4h_to_h = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        attention: Any = self.self_attention
        mlp: Any = self.mlp
        q, k, v = attention.query_key_value(self.input_layernorm(hidden)).chunk(3, -1)
        hidden = hidden + attention.dense(q * k + v)
        middle = mlp.dense_h_to_4h(self.post_attention_layernorm(hidden)).tanh()
        out: Tensor = hidden + mlp.dense_4h_to_h(middle)
        return out


def _same(hidden: Tensor) -> Tensor:
    return hidden


def _logits(embedding: EmbeddingPipe, hidden: Tensor) -> Tensor:
    return hidden @ embedding.word_embeddings.weight.t()


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _piped(folder: str, pp: int, dp: int, first_is_function: bool) -> Piped:
    import deepspeed.utils as ask
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    os.environ["LOCAL_RANK"] = "0"
    ctx = ParallelContext.build(Topology(pp=pp, dp=dp))
    deepspeed = start_deepspeed(ctx)
    torch.manual_seed(100 + ctx.pp.rank)  # so that nothing is equal over stages by chance
    tied = {"tied_weight_attr": "word_embeddings.weight"}
    module = PipelineModule(
        [
            _same,
            TiedLayerSpec("embed", EmbeddingPipe, **tied),
            *([_same] if first_is_function else []),
            *(LayerSpec(BlockPipe) for _ in range(LAYERS)),
            *([_same] if first_is_function else []),
            LayerSpec(nn.LayerNorm, HIDDEN),
            TiedLayerSpec("embed", EmbeddingPipe, forward_fn=_logits, **tied),
        ],
        topology=PipeModelDataParallelTopology(num_pp=pp, num_mp=1, num_dp=dp),
        loss_fn=_loss,
        partition_method="uniform",
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    json = _json(1) | {"gradient_accumulation_steps": 2}
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=json)
    tokens = torch.arange(SEQUENCE).view(1, SEQUENCE) % TOKENS
    for _ in range(STEPS):
        engine.train_batch(iter([(tokens, (tokens + 1) % TOKENS)] * 2))
    args = Namespace(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=2, ffn_hidden_size=4 * HIDDEN,
        max_position_embeddings=SEQUENCE, seq_length=SEQUENCE, position_embedding_type="absolute",
    )  # fmt: skip
    state = {"args": args, "checkpoint_version": 3.0, "iteration": STEPS}
    engine.save_checkpoint(folder, client_state=state)
    held = {}
    for name, p in module.named_parameters():
        values = {k: ask.safe_get_full_optimizer_state(p, k) for k in ("exp_avg", "exp_avg_sq")}
        held[name] = {"weight": p.detach(), **{k: v.view(p.shape) for k, v in values.items()}}
    return Piped({n: {k: t.clone() for k, t in kinds.items()} for n, kinds in held.items()})


def _json(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
