"""Pipeline stages generate, score and embed what one process does."""

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.errors import NumericsError
from megatron.inference.cache_size import StepSize
from megatron.inference.forward import ForwardExecutor, SliceResult, model_block_bytes
from megatron.inference.generate import Generation, generate
from megatron.inference.invariance import BatchInvariance
from megatron.inference.model_checks import check_inference_model
from megatron.inference.sampling import SequenceDraw
from megatron.inference.sampling_params import SamplingParams
from megatron.inference.start import ExecutorOptions, start_executor
from megatron.model.gpt_model import GPTModel
from megatron.mpu.collectives import barrier
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice
from tests.support.models import TINY_VOCAB, tiny_build, varied_stage
from tests.support.ranks import run_on_ranks

PROMPTS = [[7, 3, 9, 1], [4], [11, 12, 13]]
PROMPT = (7, 3, 9, 1, 5, 8, 2)
HELD_UP_S = 0.5
GREEDY = SamplingParams(greedy=True)
# A bfloat16 stream that is not kept in float32 between stages would lose bits.
MODELS: dict[str, tuple[PrecisionConfig, dict[str, Any]]] = {
    "tied": (PrecisionConfig(fp64=True), {}),
    "untied": (
        PrecisionConfig(bf16=True, fp32_residual_connection=True),
        {"untie_embeddings_and_output_weights": True},
    ),
    "alibi": (PrecisionConfig(fp64=True), {"position_embedding_type": "alibi"}),
}


class Found(NamedTuple):
    """What a rank gets of one model."""

    generations: list[list[Generation]]
    results: list[SliceResult]  # of two steps; none on a rank that only follows
    invariance: BatchInvariance


def model_of(kind: str, ctx: ParallelContext) -> GPTModel:
    precision, changes = MODELS[kind]
    return varied_stage(ctx, tiny_build(ctx, precision=precision), **changes)


def found_on(ctx: ParallelContext) -> list[Found]:
    found = []
    for kind in MODELS:
        model = model_of(kind, ctx)
        check_inference_model(model, ctx, vocabulary=TINY_VOCAB.true, eod=5)
        every = (GREEDY, SamplingParams(temperature=2.0, top_p=0.9))
        generations = [
            generate(model, PROMPTS, max_new_tokens=8, params=each, eod=5, seed=1, ctx=ctx)
            for each in every
        ]
        size = StepSize(tokens=8, sequences=1, length=8)
        options = ExecutorOptions(step=size, blocks=2, draws_alone=True)
        started = start_executor(model, ctx, options)
        found.append(Found(generations, results_of(started.executor, ctx), started.invariance))
    return found


def results_of(executor: ForwardExecutor, ctx: ParallelContext) -> list[SliceResult]:
    """Score and embed a prompt in two parts, and draw a token after it; all in flight at once.

    Between them is a step that has no results.
    """
    parts = [
        SequenceSlice(
            0, PROMPT[start:end], start, (0,), end == 7, targets=PROMPT[start + 1 : end + 1],
            top_targets=1, embeds=True,
        )
        for start, end in ((0, 3), (3, 7))
    ]  # fmt: skip
    under_way = []
    for part in (parts[0], SequenceSlice(1, (4, 2), 0, (1,), False), parts[1]):
        plan = ForwardPlan((), (part,))
        if ctx.rank > 0:
            executor.follow(plan)
            continue
        draw = SequenceDraw(params=GREEDY, seed=1, sequence=0, prompt=PROMPT, output=())
        under_way.append(executor.start(plan, {0: draw}))
    first, between, last = [end() for end in under_way] or [[], [], []]
    assert between == ([SliceResult(1)] if under_way else [])
    barrier(ctx.whole_model)  # before one of them ends that still sends
    return [*first, *last]


def held_up(grid: Topology) -> bool:
    """Return whether the first rank waits for the end of a step that has no results."""
    ctx = ParallelContext.build(grid)
    executor = ForwardExecutor(model_of("tied", ctx), ctx, blocks=1, draws_alone=True)
    plan = ForwardPlan((), (SequenceSlice(0, PROMPT, 0, (0,), False),))
    if ctx.rank > 0:
        time.sleep(HELD_UP_S)
        executor.follow(plan)
        barrier(ctx.whole_model)
        return False
    end, began = executor.start(plan, {}), time.monotonic()
    end()
    waited = time.monotonic() - began
    barrier(ctx.whole_model)
    return waited > HELD_UP_S / 2


def found_on_ranks(grid: Topology) -> list[Found]:
    return found_on(ParallelContext.build(grid))


def names_and_blocks(grid: Topology) -> tuple[list[str], tuple[int, int], int]:
    ctx = ParallelContext.build(grid)
    model = model_of("tied", ctx)
    names = [name for name, _ in model.named_parameters()]
    return names, model.blocks, model_block_bytes(model, ctx)


def equal_or_none(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def test_three_stages_generate_score_and_embed_what_one_does() -> None:
    alone = found_on(ParallelContext.single())
    greedy = [each for found in alone for each in found.generations[0]]
    assert any(len(set(each.tokens)) > 2 for each in greedy)
    ranks = run_on_ranks(3, found_on_ranks, Topology(pp=3))
    for expected, leader, *followers in zip(alone, *ranks, strict=True):
        for each in (leader, *followers):
            assert each.generations == expected.generations
            assert each.invariance == expected.invariance
        assert [each.results for each in followers] == [[], []]
        for found, wanted in zip(leader.results, expected.results, strict=True):
            assert found.hidden is not None
            assert equal_or_none(found.hidden, wanted.hidden)
            assert (found.tokens, found.targets) == (wanted.tokens, wanted.targets)
        assert [len(each.targets) for each in leader.results] == [3, 3]
        assert [len(each.tokens) for each in leader.results] == [0, 1]


def test_a_step_has_ended_when_all_stages_have_computed_it() -> None:
    assert run_on_ranks(2, held_up, Topology(pp=2)) == [True, False]


def problems_of_one_stage(grid: Topology) -> str:
    ctx = ParallelContext.build(grid)
    model = model_of("tied", ctx)
    if not model.has_head:
        model.train()
    try:
        check_inference_model(model, ctx, vocabulary=TINY_VOCAB.true, eod=None)
    except NumericsError as error:
        return error.found
    return ""


def test_a_problem_of_one_stage_is_found_by_all() -> None:
    for found in run_on_ranks(2, problems_of_one_stage, Topology(pp=2)):
        assert found.startswith("rank 0: the model and ")
        assert found.endswith("in training mode")


def test_a_stage_holds_and_caches_its_own_layers() -> None:
    whole = model_of("tied", ParallelContext.single())
    assert (whole.is_stage, whole.blocks) == (False, (0, 3))
    parts = run_on_ranks(2, names_and_blocks, Topology(pp=2))
    names = [name for name, _ in whole.named_parameters()]
    (of_first, first, first_bytes), (of_last, last, last_bytes) = parts
    assert (first, last) == ((0, 2), (2, 3))
    assert first_bytes == 2 * last_bytes
    assert [*of_first, *of_last[:-1]] == names
    assert of_last[-1] == "embedding.word.weight"
