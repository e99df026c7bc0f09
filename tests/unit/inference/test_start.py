"""An engine starts with blocks that fit; a scheduled request gets what it gets alone."""

import random
from typing import Any

import pytest
import torch

from megatron import device
from megatron.config.model import PositionEmbedding
from megatron.config.precision import PrecisionConfig
from megatron.errors import ConfigError, NumericsError
from megatron.inference import start
from megatron.inference.cache_size import StepSize
from megatron.inference.forward import ForwardExecutor
from megatron.inference.invariance import BatchInvariance
from megatron.inference.sampling import SequenceDraw
from megatron.inference.sampling_params import SamplingParams
from megatron.inference.start import ExecutorOptions, start_executor
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice, with_drafts
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.requests import Request, RequestState
from megatron.scheduling.scheduler import Scheduler
from tests.support.models import TINY_VOCAB, tiny_build, tiny_config, tiny_model

CTX = ParallelContext.single()
STEP = StepSize(tokens=16, sequences=4, length=40)


def model_of(**changes: Any) -> GPTModel:
    config = tiny_config(
        max_position_embeddings=40, num_query_groups=2, init_method_std=0.3, **changes
    )
    build = tiny_build(precision=PrecisionConfig(bf16=True))
    return tiny_model(config, build).eval().requires_grad_(False)


def test_blocks_are_those_that_fit_or_those_that_were_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of()
    found = start_executor(model, CTX, ExecutorOptions(step=STEP, blocks=7, deterministic=True))
    assert found.executor.limits.blocks == 7
    assert found.invariance == BatchInvariance(())
    monkeypatch.setattr(start, "blocks_that_fit", lambda *args, **kwargs: 5)
    assert start_executor(model, CTX, ExecutorOptions(step=STEP)).executor.limits.blocks == 5


def test_an_engine_that_cannot_hold_what_is_asked_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="deterministic scores need products"):
        ExecutorOptions(step=STEP, deterministic=True, batch_invariant=False)
    monkeypatch.setattr(device, "free_memory_bytes", lambda: None)
    with pytest.raises(ConfigError, match="how many blocks of keys and values fit is unknown"):
        start_executor(model_of(), CTX, ExecutorOptions(step=STEP))
    differs = BatchInvariance(("in a batch",))
    monkeypatch.setattr(start, "probe_batch_invariance", lambda *args: differs)
    options = ExecutorOptions(step=STEP, blocks=7)
    assert start_executor(model_of(), CTX, options).invariance == differs
    strict = ExecutorOptions(step=STEP, blocks=7, deterministic=True)
    with pytest.raises(NumericsError, match="would get other scores beside other requests"):
        start_executor(model_of(), CTX, strict)


def sampled_alone(model: GPTModel, request: Request, sequence: int, choice: int) -> list[int]:
    """Return what one sample of a request draws, each time with everything computed anew."""
    text = list(request.prompt)
    while len(text) < len(request.prompt) + request.max_new_tokens:
        executor = ForwardExecutor(model, CTX, blocks=10, block_size=4)
        plan = ForwardPlan((), (SequenceSlice(0, tuple(text), 0, tuple(range(10)), True),))
        draw = draw_of(request, choice, text)
        (result,) = executor.run(plan, {0: draw})
        text += result.tokens
    return text[len(request.prompt) :]


def draw_of(request: Request, choice: int, text: list[int]) -> SequenceDraw:
    params = SamplingParams(temperature=1.5, top_k=20, presence_penalty=0.3)
    output = text[len(request.prompt) :]
    return SequenceDraw(
        params=params, seed=len(request.id), choice=choice, prompt=request.prompt, output=output
    )


def half_right(part: SequenceSlice, expected: list[int]) -> list[int]:
    """Return proposed tokens of which every third one is wrong, as are all behind it."""
    found = expected[part.end : part.end + part.draft_room]
    return [token if (part.end + at) % 3 else (token + 1) % 50 for at, token in enumerate(found)]


@pytest.mark.parametrize(
    ("kind", "speculative_tokens"),
    [(PositionEmbedding.ROPE, 0), (PositionEmbedding.ROPE, 3), (PositionEmbedding.ALIBI, 2)],
)
def test_a_scheduled_request_gets_what_it_gets_alone(
    kind: PositionEmbedding, speculative_tokens: int
) -> None:
    # A pool so small that requests are preempted, prompts with common blocks, several samples.
    model = model_of(position_embedding_type=kind)
    blocks = 13 if speculative_tokens else 15
    options = ExecutorOptions(step=STEP, blocks=blocks, block_size=4)
    executor = start_executor(model, CTX, options).executor
    scheduler = Scheduler(
        SchedulerLimits(
            blocks=blocks, block_size=4, max_length=40, vocab_size=TINY_VOCAB.true,
            max_tokens_per_step=STEP.tokens, max_sequences=6, watermark_blocks=0,
            speculative_tokens=speculative_tokens,
        )
    )  # fmt: skip
    random_of = random.Random(1)
    common = tuple(random_of.randrange(TINY_VOCAB.true) for _ in range(9))
    requests = [
        Request(
            id="r" * number,
            prompt=(*common[: number + 4], *(random_of.randrange(50) for _ in range(number))),
            max_new_tokens=6 + number,
            samples=1 + number % 2,
            arrival_ns=0,
        )
        for number in range(1, 6)
    ]
    owners: dict[int, tuple[Request, int]] = {}
    for request in requests:
        for choice, sequence in enumerate(scheduler.submit(request)):
            owners[sequence] = (request, choice)
    texts = {sequence: list(request.prompt) for sequence, (request, _) in owners.items()}
    expected = {
        sequence: [*request.prompt, *sampled_alone(model, request, sequence, choice)]
        for sequence, (request, choice) in owners.items()
    }
    preemptions = copies = shared = accepted = 0
    for step in range(200):
        plan = scheduler.plan(step)
        if not plan.slices:
            break
        copies += len(plan.copies)
        shared += sum(part.start > 0 and len(part.tokens) > 1 for part in plan.slices)
        draws = {
            part.sequence: draw_of(*owners[part.sequence], texts[part.sequence])
            for part in plan.slices
            if part.samples
        }
        drafts = {
            part.sequence: half_right(part, expected[part.sequence])
            for part in plan.slices
            if part.draft_room
        }
        results = executor.run(with_drafts(plan, drafts), draws)
        drawn = {each.sequence: each.tokens for each in results if each.tokens}
        for sequence, tokens in drawn.items():
            texts[sequence] += tokens
        scheduler.complete(drawn)
        preemptions += len(scheduler.take_preemptions())
        accepted += sum(len(each.tokens) - 1 for each in results if each.tokens)
    ends = scheduler.take_ended()
    assert [end.state for end in ends] == [RequestState.COMPLETED] * len(requests)
    assert min(preemptions, copies, shared) > 0
    assert (accepted > 0) == (speculative_tokens > 0)
    assert texts == expected
    assert torch.is_inference_mode_enabled() is False
