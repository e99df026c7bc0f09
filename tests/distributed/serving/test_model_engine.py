"""An engine of several ranks generates what one generates, and scores prompts alike."""

from typing import Any

import pytest
import torch

from megatron.inference.generate import generate
from megatron.inference.sampling_params import SamplingParams
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from megatron.serving.engine_thread import EngineThread
from megatron.serving.model_engine import EngineSize, model_engine
from tests.support.models import TINY_VOCAB, varied_stage
from tests.support.ranks import run_on_ranks
from tests.support.serving.calls import run
from tests.unit.serving.test_model_engine import CLOSE, NEW, PROMPTS, scores_of, tokens_of

Found = tuple[list[list[int]], list[float]]
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "swiglu": True, "ffn_hidden_size": 24}


def served_on_ranks(grid: Topology, changes: dict[str, Any]) -> Found | str:
    ctx = ParallelContext.build(grid)
    model = varied_stage(ctx, **changes)
    engine = model_engine(model, ctx, EngineSize(sequences=2), max_queued=8)
    if not isinstance(engine, EngineThread):
        return engine.run()

    async def ask() -> Found:
        tokens = await tokens_of(engine, PROMPTS)
        return tokens, [each.logprob for each in await scores_of(engine, PROMPTS[0])]

    found: Found = run(ask())
    assert engine.stop()
    return found


@pytest.mark.parametrize(
    ("grid", "changes"),
    [
        (Topology(tp=2), {}),
        (Topology(dp=2, ep=2), EXPERTS),
        (Topology(pp=2), EXPERTS),
        (Topology(tp=2, pp=2), {}),
    ],
    ids=["tensor parallel", "expert parallel", "stages", "split stages"],
)
def test_ranks_serve_what_one_generates(grid: Topology, changes: dict[str, Any]) -> None:
    ctx = ParallelContext.single()
    model = varied_stage(ctx, **changes)
    alone = generate(
        model,
        PROMPTS,
        max_new_tokens=NEW,
        params=SamplingParams(greedy=True),
        eod=None,
        seed=1,
        ctx=ctx,
    )
    leader, *followers = run_on_ranks(grid.world_size, served_on_ranks, grid, changes)
    assert set(followers) == {"the engine was stopped"}
    assert not isinstance(leader, str)
    tokens, scores = leader
    assert tokens == [list(each.tokens) for each in alone]
    logits = model(torch.tensor([PROMPTS[0]]))[:-1, 0, : TINY_VOCAB.true]
    following = torch.tensor(PROMPTS[0][1:])
    expected = logits.log_softmax(dim=-1).gather(1, following[:, None])[:, 0].tolist()
    assert scores == pytest.approx(expected, abs=CLOSE)
