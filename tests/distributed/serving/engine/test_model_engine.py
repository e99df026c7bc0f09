"""An engine of several ranks generates what one generates, and scores prompts alike."""

from typing import Any

import pytest
import torch

from megatron.inference.forward import ForwardExecutor
from megatron.inference.generate import generate
from megatron.inference.model_checks import check_inference_model
from megatron.inference.sampling_params import SamplingParams
from megatron.model.experts.mixture import Experts
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice
from megatron.serving.engine.engine_thread import EngineThread
from megatron.serving.engine.model_engine import EngineSize, Speculation, model_engine
from tests.support.models import TINY_VOCAB, tiny_build, varied_stage
from tests.support.ranks import run_on_ranks
from tests.support.serving.calls import run
from tests.unit.serving.engine.test_model_engine import CLOSE, NEW, PROMPTS, scores_of, tokens_of

Found = tuple[list[list[int]], list[float]]
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "swiglu": True, "ffn_hidden_size": 24}
SHARED = {**EXPERTS, "moe_shared_expert_intermediate_size": 8}


def generated(model: GPTModel, ctx: ParallelContext) -> list[list[int]]:
    greedy = SamplingParams(greedy=True)
    found = generate(model, PROMPTS, max_new_tokens=NEW, params=greedy, eod=None, seed=1, ctx=ctx)
    return [list(each.tokens) for each in found]


def served_on_ranks(
    grid: Topology, changes: dict[str, Any], expected: list[list[int]]
) -> Found | str:
    ctx = ParallelContext.build(grid)
    model = varied_stage(ctx, tiny_build(ctx, repeats_tokens=True), **changes)
    check_inference_model(model, ctx, vocabulary=TINY_VOCAB.true, eod=None)
    assert generated(model, ctx) == expected
    draft = None
    if grid.pp > 1 and ctx.world.is_first:  # the model itself, on the rank that draws
        draft = varied_stage(ParallelContext.single(), **changes)
    speculation = Speculation(3, draft) if grid.pp > 1 else None
    size = EngineSize(sequences=2)
    engine = model_engine(model, ctx, size, max_queued=8, speculation=speculation)
    if not isinstance(engine, EngineThread):
        return engine.run()

    async def ask() -> Found:
        tokens = await tokens_of(engine, PROMPTS)
        return tokens, [each.logprob for each in await scores_of(engine, PROMPTS[0])]

    assert engine._scheduler.limits.steps_in_flight == grid.pp
    found: Found = run(ask())
    status = engine.status()
    assert status.accepted_tokens == status.draft_tokens
    assert (status.draft_tokens > 0) is (draft is not None)
    assert engine.stop()
    return found


@pytest.mark.parametrize(
    ("grid", "changes"),
    [
        (Topology(tp=2), {}),
        pytest.param(Topology(tp=2, ep=2, etp=1), EXPERTS, marks=pytest.mark.wide),
        (Topology(tp=2, dp=2, ep=2), SHARED),
        (Topology(pp=2), EXPERTS),
        (Topology(tp=2, pp=2), {}),
        (Topology(pp=2, dp=2, ep=2), EXPERTS),
        (Topology(tp=2, pp=2, ep=2, etp=1), SHARED),
        pytest.param(Topology(tp=2, pp=2, dp=2, ep=2), SHARED, marks=pytest.mark.wide),
    ],
    ids=[
        *("tensor parallel", "expert parallel", "split experts", "stages", "split stages"),
        *("experts in stages", "experts in split stages", "split experts in split stages"),
    ],
)
def test_ranks_serve_what_one_generates(grid: Topology, changes: dict[str, Any]) -> None:
    ctx = ParallelContext.single()
    model = varied_stage(ctx, **changes)
    alone = generated(model, ctx)
    leader, *followers = run_on_ranks(grid.world_size, served_on_ranks, grid, changes, alone)
    assert set(followers) == {"the engine was stopped"}
    assert not isinstance(leader, str)
    tokens, scores = leader
    assert tokens == alone
    logits = model(torch.tensor([PROMPTS[0]]))[:-1, 0, : TINY_VOCAB.true]
    following = torch.tensor(PROMPTS[0][1:])
    expected = logits.log_softmax(dim=-1).gather(1, following[:, None])[:, 0].tolist()
    assert scores == pytest.approx(expected, abs=CLOSE)


def rows_of_experts(grid: Topology | None) -> int:
    """Return how many rows the experts of this rank compute for one step of four tokens."""
    ctx = ParallelContext.single() if grid is None else ParallelContext.build(grid)
    model = varied_stage(ctx, tiny_build(ctx, repeats_tokens=True), **EXPERTS)
    rows: list[int] = []
    for each in model.modules():
        if isinstance(each, Experts):
            each.fc1.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    executor = ForwardExecutor(model, ctx, blocks=1)
    executor.scores(ForwardPlan((), (SequenceSlice(0, (7, 3, 9, 1), 0, (0,), True),)))
    return sum(rows)


def test_each_token_is_computed_once_by_each_of_its_experts() -> None:
    alone = rows_of_experts(None)
    assert sum(run_on_ranks(2, rows_of_experts, Topology(tp=2, ep=2, etp=1))) == alone
