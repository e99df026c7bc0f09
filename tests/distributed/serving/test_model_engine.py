"""An engine of two ranks generates what one rank generates, and scores prompts alike."""

from typing import Any

import pytest

from megatron.inference.generate import generate
from megatron.inference.sampling_params import SamplingParams
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from megatron.serving.engine_thread import EngineThread
from megatron.serving.model_engine import EngineSize, model_engine, prompt_scorer
from tests.support.models import roughen, tiny_build, tiny_config
from tests.support.ranks import run_on_ranks
from tests.unit.serving.test_model_engine import CLOSE, PROMPTS, tokens_of

Found = tuple[list[list[int]], list[float]]
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "swiglu": True, "ffn_hidden_size": 24}


def model_of(ctx: ParallelContext, **changes: Any) -> GPTModel:
    config = tiny_config(max_position_embeddings=40, num_query_groups=2, **changes)
    model = GPTModel(config, tiny_build(ctx)).eval().requires_grad_(False)
    roughen(model, ctx)
    return model


def served_on_ranks(grid: Topology, changes: dict[str, Any]) -> Found | str:
    ctx = ParallelContext.build(grid)
    model = model_of(ctx, **changes)
    scores = [each.logprob for each in prompt_scorer(model, ctx)(PROMPTS[0], 0)]
    engine = model_engine(model, ctx, EngineSize(sequences=2), max_queued=8)
    if not isinstance(engine, EngineThread):
        return engine.run()
    tokens = tokens_of(engine, PROMPTS)
    assert engine.stop()
    return tokens, scores


@pytest.mark.parametrize(
    ("grid", "changes"),
    [(Topology(tp=2), {}), (Topology(dp=2, ep=2), EXPERTS)],
    ids=["tensor parallel", "expert parallel"],
)
def test_two_ranks_serve_what_one_generates(grid: Topology, changes: dict[str, Any]) -> None:
    ctx = ParallelContext.single()
    model = model_of(ctx, **changes)
    alone = generate(
        model,
        PROMPTS,
        max_new_tokens=6,
        params=SamplingParams(greedy=True),
        eod=None,
        seed=1,
        ctx=ctx,
    )
    leader, follower = run_on_ranks(2, served_on_ranks, grid, changes)
    assert follower == "the engine was stopped"
    tokens, scores = leader
    assert tokens == [list(each.tokens) for each in alone]
    expected = [each.logprob for each in prompt_scorer(model, ctx)(PROMPTS[0], 0)]
    assert all(abs(one - other) < CLOSE for one, other in zip(scores, expected, strict=True))
