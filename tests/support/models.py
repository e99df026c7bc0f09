"""Tiny GPTs for tests: every value counts, because no bias is zero and no gain is one."""

import dataclasses
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.activations import ActivationPolicy, RecomputeMethod
from megatron.config.model import ModelConfig, PositionEmbedding
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.engine.cuts import stage_ranges
from megatron.model.bert_model import BertModel
from megatron.model.gpt_model import GPTModel, gpt_layers
from megatron.model.init import initialize_parameters
from megatron.model.specs import ModelBuild, VocabSize
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.partition import Init, InitKind, init_of
from megatron.mpu.random import RandomStreams, Samples
from megatron.mpu.topology import Topology
from megatron.pipeline.plan import pipeline_plan

TINY_VOCAB = VocabSize(true=50, padded=56)
GPT_POSITIONS = [kind for kind in PositionEmbedding if kind is not PositionEmbedding.RELATIVE]


def second_of_two() -> ParallelContext:
    """The context of tp rank 1 of 2, for tests that build but do not communicate."""
    one, two = Group((1,), 0), Group((0, 1), 1)
    alone = ParallelContext.single()
    return replace(alone, topology=Topology(tp=2), world=two, tp=two, pp=one, dp=one, model=two)


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers of width 16 with four heads, without dropout."""
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.3,
    }
    return ModelConfig(**(values | changes))


def tiny_build(ctx: ParallelContext | None = None, **changes: Any) -> ModelBuild:
    """float64, 12 positions, one rank unless `ctx` is given; `recompute`: every layer."""
    if changes.pop("recompute", False):
        changes["activations"] = ActivationPolicy(method=RecomputeMethod.UNIFORM)
    ctx = ctx or ParallelContext.single()
    streams = RandomStreams(5)
    streams.samples = Samples(0, 1)  # for passes outside of a step
    build = ModelBuild(
        ctx=ctx,
        vocab=TINY_VOCAB,
        seq_length=12,
        streams=streams,
        precision=PrecisionConfig(fp64=True),
    )
    return dataclasses.replace(build, **changes)


def tiny_model(config: ModelConfig, build: ModelBuild | None = None) -> GPTModel:
    """A GPT with rough values, in training mode."""
    build = build or tiny_build()
    model = GPTModel(config, build)
    roughen(model, build.ctx)
    return model


def varied_model(build: ModelBuild | None = None, **changes: Any) -> GPTModel:
    """A tiny GPT in evaluation mode whose greedy choice depends on the text before it.

    The bias of the last norm in `tiny_model` decides most scores, so that it repeats one token.
    """
    values = {
        "untie_embeddings_and_output_weights": True,
        "init_method_std": 1.5,
        "hidden_size": 32,
    } | changes
    model = tiny_model(tiny_config(**values), build)
    with torch.no_grad():
        model.get_parameter("final_norm.weight").fill_(1.0)
        model.get_parameter("final_norm.bias").zero_()
    return model.eval()


def varied_stage(ctx: ParallelContext, build: ModelBuild | None = None, **changes: Any) -> GPTModel:
    """The stage of this rank of a GPT of three layers; on one rank, all of it.

    Its greedy choice depends on the text before it, as that of `varied_model`.
    """
    values = {"num_layers": 3, "hidden_size": 32, "init_method_std": 1.5, "num_query_groups": 2}
    config = tiny_config(max_position_embeddings=40, **(values | changes))
    build = build or tiny_build(ctx)
    flags = ParallelConfig(pipeline_model_parallel_size=ctx.pp.size)
    plan = pipeline_plan(flags, config.num_layers)
    layers = stage_ranges(gpt_layers(config, build), plan, ctx.pp.size)[ctx.pp.rank]
    model = GPTModel(config, build, layers=layers).eval().requires_grad_(False)
    roughen(model, ctx)
    if model.has_head:
        model.get_parameter("final_norm.weight").fill_(1.0)
        model.get_parameter("final_norm.bias").zero_()
    return model


def tiny_bert(
    config: ModelConfig, build: ModelBuild | None = None, *, order_head: bool = True
) -> BertModel:
    """A BERT with rough values, in training mode."""
    build = build or tiny_build()
    model = BertModel(config, build, order_head=order_head)
    roughen(model, build.ctx)
    return model


def roughen(model: nn.Module, ctx: ParallelContext) -> None:
    """Fill `model` as training does, but for biases and gains, which become random too."""
    for parameter in model.parameters():
        init = init_of(parameter)
        if init is not None and init.kind in ("zeros", "ones"):
            parameter.init = Init(InitKind.NORMAL, std=0.5)  # type: ignore[attr-defined]
    initialize_parameters(model, seed=3, ctx=ctx)


def tiny_tokens(batch: int = 2, length: int = 9, *, seed: int = 0) -> Tensor:
    """Random token ids [b, s] of the true vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TINY_VOCAB.true, (batch, length), generator=generator)
