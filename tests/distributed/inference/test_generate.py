"""Ranks that share a model generate the same tokens, and those that one rank generates."""

import torch.distributed as dist

from megatron.inference.generate import Generation, generate
from megatron.inference.sampling_params import SamplingParams
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import VocabSize
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.models import GPT_POSITIONS, roughen, tiny_build, tiny_config
from tests.support.ranks import run_on_ranks

PROMPTS = [[7, 3, 9, 1], [4], [11, 12, 13]]


def continued(ctx: ParallelContext) -> list[list[Generation]]:
    results = []
    for kind in GPT_POSITIONS:
        config = tiny_config(position_embedding_type=kind, num_query_groups=2)
        build = tiny_build(ctx, vocab=VocabSize(51, 52 if ctx.tp.size == 1 else 64))
        model = GPTModel(config, build)
        roughen(model, ctx)
        for params in (SamplingParams(greedy=True), SamplingParams(temperature=2.0, top_p=0.9)):
            results.append(
                generate(model, PROMPTS, max_new_tokens=6, params=params, eod=5, seed=1, ctx=ctx)
            )
    return results


def continued_on_ranks() -> list[list[Generation]]:
    return continued(ParallelContext.build(Topology(tp=dist.get_world_size())))


def test_two_ranks_generate_what_one_does() -> None:
    alone = continued(ParallelContext.single())
    first, second = run_on_ranks(2, continued_on_ranks)
    assert first == second == alone
