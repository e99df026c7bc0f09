"""A model behind the server gives the text and the scores that it gives alone."""

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from megatron.errors import ConfigError, MachineError
from megatron.inference import start
from megatron.inference.generate import generate
from megatron.inference.invariance import BatchInvariance
from megatron.inference.sampling_params import SamplingParams
from megatron.launch import Launch
from megatron.mpu.context import ParallelContext
from megatron.serving import model_engine as served_models
from megatron.serving.engine_client import (
    EngineEvent,
    EngineRequest,
    PromptScored,
    RequestEnded,
    SamplingOptions,
    TokenDrawn,
)
from megatron.serving.engine_thread import EngineThread
from megatron.serving.model_engine import (
    EngineSize,
    check_engine_ranks,
    model_engine,
    prompt_scorer,
)
from tests.support.models import TINY_VOCAB, tiny_config, tiny_model
from tests.support.serving.calls import run

CTX = ParallelContext.single()
CLOSE = 1e-5  # float32 log-probabilities of float64 scores
PROMPTS = [(7, 3, 9, 1), (4,), (11, 12, 13, 14, 15, 16)]


def tokens_of(engine: EngineThread, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Start an engine and let it continue prompts that come together, greedily, by six tokens."""

    async def ask() -> list[list[int]]:
        engine.start()
        tokens: list[list[int]] = [[] for _ in prompts]
        ended = [asyncio.Event() for _ in prompts]

        def deliver(number: int, event: EngineEvent) -> None:
            if isinstance(event, TokenDrawn):
                tokens[number].append(event.token)
            elif isinstance(event, RequestEnded):
                assert event.state == "completed", event.detail
                ended[number].set()

        for number, prompt in enumerate(prompts):
            request = EngineRequest(
                id=str(number),
                prompt=prompt,
                max_new_tokens=6,
                sampling=SamplingOptions(greedy=True),
            )
            engine.submit(request, partial(deliver, number))
        await asyncio.gather(*(event.wait() for event in ended))
        return tokens

    found: list[list[int]] = run(ask())
    return found


def test_requests_that_come_together_get_the_text_of_each_alone() -> None:
    model = tiny_model(tiny_config(max_position_embeddings=40)).eval()
    engine = model_engine(model, CTX, EngineSize(sequences=4), max_queued=8)

    assert isinstance(engine, EngineThread)
    found = tokens_of(engine, PROMPTS)
    assert engine.stop()
    alone = [
        generate(
            model,
            [prompt],
            max_new_tokens=6,
            params=SamplingParams(greedy=True),
            eod=None,
            seed=1,
            ctx=CTX,
        )[0]
        for prompt in PROMPTS
    ]
    assert [tuple(tokens) for tokens in found] == [tuple(each.tokens) for each in alone]


@pytest.mark.parametrize("together", [256, 2, 1])
def test_a_prompt_is_scored_by_the_models_own_log_probabilities(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_models, "_SCORED_TOGETHER", together)
    model = tiny_model(tiny_config()).eval()
    prompt = (7, 3, 9, 1)
    scores = prompt_scorer(model, CTX)(prompt, 2)
    logits = model(torch.tensor([prompt]))[:, 0, : TINY_VOCAB.true].detach()
    expected = logits.log_softmax(dim=-1)
    assert len(scores) == len(prompt) - 1
    for place, score in enumerate(scores):
        assert score.logprob == pytest.approx(float(expected[place, prompt[place + 1]]), abs=CLOSE)
        assert [token for token, _ in score.top] == expected[place].topk(2).indices.tolist()
    assert PromptScored(prompt_scorer(model, CTX)((7,), 2)) == PromptScored(())


def test_sequences_longer_than_the_model_are_refused() -> None:
    model = tiny_model(tiny_config(max_position_embeddings=40))
    with pytest.raises(ConfigError, match="not that of the model") as caught:
        model_engine(model, CTX, EngineSize(length=41), max_queued=1)
    assert caught.value.fix == "use --max-model-len 40"


def test_ranks_that_are_no_whole_replicas_are_refused() -> None:
    check_engine_ranks(Launch(world_size=4, local_world_size=4), tp=2, ep=1)
    check_engine_ranks(Launch(world_size=4, local_world_size=4), tp=1, ep=4)
    with pytest.raises(ConfigError, match="no whole replicas of the model") as caught:
        check_engine_ranks(Launch(world_size=3, local_world_size=3), tp=2, ep=1)
    assert caught.value.fix == "start 2 ranks for each replica"


def test_tensor_and_expert_parallelism_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not combine tensor and expert") as caught:
        check_engine_ranks(Launch(world_size=4, local_world_size=4), tp=2, ep=2)
    assert caught.value.fix.startswith("use one of them: --tensor-model-parallel-size 2")


def test_ranks_of_several_machines_are_refused() -> None:
    with pytest.raises(ConfigError, match="on several machines") as caught:
        check_engine_ranks(Launch(world_size=4, local_world_size=2), tp=2, ep=1)
    assert caught.value.found == "2 of 4 ranks on this one"


def test_the_pool_is_as_large_as_asked_for_or_as_all_sequences_need() -> None:
    model = tiny_model(tiny_config(max_position_embeddings=40))
    for blocks, expected in ((5, 5), (None, 3 * 2)):
        size = EngineSize(sequences=3, blocks=blocks)
        engine = model_engine(model, CTX, size, max_queued=1)
        assert isinstance(engine, EngineThread)
        assert engine.status().blocks == expected


def test_more_blocks_than_fit_into_memory_are_refused() -> None:
    model = tiny_model(tiny_config(max_position_embeddings=40))
    with pytest.raises(MachineError, match="do not fit into memory") as caught:
        model_engine(model, CTX, EngineSize(blocks=1 << 40), max_queued=1)
    assert "--cache-blocks" in str(caught.value)


@pytest.mark.parametrize("differences", [(), ("in a batch",)])
def test_the_probe_of_equal_bits_is_shown(
    differences: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(start, "probe_batch_invariance", lambda *_: BatchInvariance(differences))
    model = tiny_model(tiny_config(max_position_embeddings=40))
    engine = model_engine(model, CTX, EngineSize(sequences=3), max_queued=1)
    assert isinstance(engine, EngineThread)
    assert engine.status().is_batch_invariant == (not differences)
    warned = (
        "requests get other bits beside others than alone: in a batch" in capsys.readouterr().err
    )
    assert warned == bool(differences)


def test_prefix_lms_are_refused() -> None:
    model = tiny_model(tiny_config(max_position_embeddings=40)).eval()
    model.prompt_is_prefix = True
    with pytest.raises(ConfigError, match="the server does not serve prefix LMs"):
        model_engine(model, CTX, EngineSize(), max_queued=1)
