"""An engine starts with blocks that fit; a scheduled request gets what it gets alone."""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

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
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.requests import Request, RequestState
from tests.support.inference.engine_loop import run_engine
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


def draw_of(request: Request, choice: int, output: Sequence[int]) -> SequenceDraw:
    params = SamplingParams(temperature=1.5, top_k=20, presence_penalty=0.3)
    return SequenceDraw(
        params=params, seed=len(request.id), choice=choice, prompt=request.prompt, output=output
    )


def sampled_alone(model: GPTModel, request: Request, choice: int) -> list[int]:
    """Return the text of one sample of a request, each token with everything computed anew."""
    text = list(request.prompt)
    while len(text) < len(request.prompt) + request.max_new_tokens:
        executor = ForwardExecutor(model, CTX, blocks=10, block_size=4)
        plan = ForwardPlan((), (SequenceSlice(0, tuple(text), 0, tuple(range(10)), True),))
        (result,) = executor.run(plan, {0: draw_of(request, choice, text[len(request.prompt) :])})
        text += result.tokens
    return text


class MostlyRight:
    """Proposes the known text of every sequence, with wrong tokens in it."""

    def __init__(self, texts: Iterable[list[int]]) -> None:
        self._texts = list(texts)

    def propose(
        self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]
    ) -> Mapping[int, Sequence[int]]:
        found = {}
        for part in plan.slices:
            if part.draft_room:
                text = [*draws[part.sequence].prompt, *draws[part.sequence].output]
                known = next(one for one in self._texts if one[: len(text)] == text)
                following = known[len(text) : len(text) + part.draft_room]
                found[part.sequence] = [
                    token if (len(text) + at) % 3 else (token + 1) % TINY_VOCAB.true
                    for at, token in enumerate(following)
                ]
        return found


@pytest.mark.parametrize(
    ("kind", "blocks", "speculative_tokens"),
    [
        (PositionEmbedding.ROPE, 15, 0),
        (PositionEmbedding.ROPE, 13, 3),
        (PositionEmbedding.ALIBI, 13, 2),
    ],
)
def test_a_scheduled_request_gets_what_it_gets_alone(
    kind: PositionEmbedding, blocks: int, speculative_tokens: int
) -> None:
    # A pool so small that requests are preempted, prompts with common blocks, several samples.
    model = model_of(position_embedding_type=kind)
    options = ExecutorOptions(step=STEP, blocks=blocks, block_size=4)
    limits = SchedulerLimits(
        blocks=blocks, block_size=4, max_length=40, vocab_size=TINY_VOCAB.true,
        max_tokens_per_step=STEP.tokens, max_sequences=6, watermark_blocks=0,
        speculative_tokens=speculative_tokens,
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
    expected = {
        (request.id, choice): sampled_alone(model, request, choice)
        for request in requests
        for choice in range(request.samples)
    }
    run = run_engine(
        start_executor(model, CTX, options).executor,
        requests,
        limits,
        draw_of=draw_of,
        drafter=MostlyRight(expected.values()),
    )
    assert [end.state for end in run.ends.values()] == [RequestState.COMPLETED] * len(requests)
    assert min(run.preemptions, run.copies, run.shared) > 0
    assert (0 < run.accepted < run.drafted) == (speculative_tokens > 0)
    for request in requests:
        for choice, output in enumerate(run.tokens[request.id]):
            assert [*request.prompt, *output] == expected[request.id, choice]
