"""A model behind the server gives the text and the scores that it gives alone."""

import asyncio
import json
from collections.abc import Callable, Sequence

import pytest
import torch

from megatron.errors import ConfigError, MachineError
from megatron.inference import start
from megatron.inference.forward import model_block_bytes
from megatron.inference.generate import generate
from megatron.inference.invariance import BatchInvariance
from megatron.inference.sampling_params import SamplingParams
from megatron.launch import Launch
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import VocabSize
from megatron.mpu.context import ParallelContext
from megatron.serving.engine.engine_thread import EngineThread
from megatron.serving.engine.model_engine import (
    EngineSize,
    Speculation,
    model_engine,
    ranks_of_replica,
)
from megatron.serving.engine_client import (
    EngineEvent,
    EngineRequest,
    PromptComputed,
    RequestEnded,
    SamplingOptions,
    TokenDrawn,
    TokenScore,
)
from tests.support.models import (
    TINY_VOCAB,
    tiny_build,
    tiny_config,
    tiny_model,
    varied_model,
)
from tests.support.serving.calls import Reply, app_of, call, run
from tests.support.serving.models import served_model

CTX = ParallelContext.single()
CLOSE = 1e-5  # float32 log-probabilities of float64 scores
NEW = 12
PROMPTS = [(7, 3, 9, 1), (4,), (11, 12, 13, 14, 15, 16)]


SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "new": {"type": "boolean"}},
    "required": ["size", "new"],
    "additionalProperties": False,
}
ANSWER = {
    "prompt": "x",
    "max_tokens": 150,
    "n": 3,
    "seed": 5,
    "temperature": 2,
    "logit_bias": {str(ord(space)): -100 for space in " \n\t\r"},  # there may be any number of them
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
}


def replies(speculation: Speculation | None) -> list[Reply]:
    """Return what a model of bytes answers with a grammar, without, cut, and to a wrong one."""
    config = tiny_config(max_position_embeddings=200)
    model = tiny_model(config, tiny_build(vocab=VocabSize(257, 264), seq_length=200)).eval()
    served = served_model(context_length=200)
    size = EngineSize(sequences=4)
    engine = model_engine(
        model, CTX, size, max_queued=8, rules=served.rules, speculation=speculation
    )

    async def ask() -> list[Reply]:
        engine.start()
        app = app_of(engine, model=served)
        free = {"prompt": "x", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        bodies = (ANSWER, free, ANSWER | {"max_tokens": 3, "n": 1}, free | {"guided_regex": "("})
        calls = (call(app, "POST", "/v1/completions", each) for each in bodies)
        return list(await asyncio.gather(*calls, call(app, "POST", "/v1/completions", free)))

    try:
        return run(ask())
    finally:
        assert engine.stop()


def test_a_model_of_random_weights_answers_as_a_grammar_says() -> None:
    found, free, cut, refused, again = replies(None)
    choices = found.json["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 3
    values = [json.loads(choice["text"]) for choice in choices]
    assert all(list(value) == ["size", "new"] for value in values)
    assert cut.json["choices"][0]["finish_reason"] == "length"
    assert (refused.status, refused.error["code"]) == (400, "invalid_value")
    assert free.json["choices"] == again.json["choices"]  # what runs beside it is as without
    proposed = replies(Speculation(3))
    for one, other in ((found, proposed[0]), (free, proposed[1]), (cut, proposed[2])):
        assert one.json["choices"] == other.json["choices"]


async def tokens_of(engine: EngineThread, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Return the likeliest tokens behind each prompt, of requests that come together."""
    engine.start()
    tokens: list[list[int]] = [[] for _ in prompts]
    ended = [asyncio.Event() for _ in prompts]

    def listener(number: int) -> Callable[[EngineEvent], None]:
        def deliver(event: EngineEvent) -> None:
            if isinstance(event, TokenDrawn):
                tokens[number].append(event.token)
            elif isinstance(event, RequestEnded):
                assert event.state == "completed", event.detail
                ended[number].set()

        return deliver

    greedy = SamplingOptions(greedy=True)
    for number, prompt in enumerate(prompts):
        request = EngineRequest(id=str(number), prompt=prompt, max_new_tokens=NEW, sampling=greedy)
        engine.submit(request, listener(number))
    await asyncio.gather(*(event.wait() for event in ended))
    return tokens


def alone(model: GPTModel, prompt: tuple[int, ...]) -> list[int]:
    params = SamplingParams(greedy=True)
    (found,) = generate(
        model, [prompt], max_new_tokens=NEW, params=params, eod=None, seed=1, ctx=CTX
    )
    return list(found.tokens)


@pytest.mark.parametrize("speculation", ["none", "ngram", "the model", "another model"])
def test_requests_that_come_together_get_the_text_of_each_alone(speculation: str) -> None:
    model = varied_model(max_position_embeddings=40)
    other = tiny_model(tiny_config(max_position_embeddings=40, num_layers=1))
    drafts = {
        "none": None,
        "ngram": Speculation(3),
        "the model": Speculation(3, model),
        "another model": Speculation(3, other),
    }
    size = EngineSize(sequences=4)
    engine = model_engine(model, CTX, size, max_queued=8, speculation=drafts[speculation])
    found = run(tokens_of(engine, PROMPTS))
    assert engine.stop()
    assert found == [alone(model, prompt) for prompt in PROMPTS]
    status = engine.status()
    assert status.generated_tokens == NEW * len(PROMPTS)
    assert (status.draft_tokens > 0) == (speculation != "none")
    if speculation == "the model":
        assert status.accepted_tokens == status.draft_tokens


async def scores_of(engine: EngineThread, prompt: tuple[int, ...]) -> tuple[TokenScore, ...]:
    """Return the log-probabilities of a prompt, and of the two likeliest tokens at each place."""
    events: list[EngineEvent] = []
    ended = asyncio.Event()

    def deliver(event: EngineEvent) -> None:
        events.append(event)
        if isinstance(event, RequestEnded):
            ended.set()

    request = EngineRequest(id="scored", prompt=prompt, max_new_tokens=0, prompt_logprobs=2)
    engine.submit(request, deliver)
    await ended.wait()
    first, _ = events
    assert isinstance(first, PromptComputed)
    assert first.scores is not None
    return first.scores


def test_a_prompt_that_is_scored_gets_the_models_own_log_probabilities() -> None:
    model = tiny_model(tiny_config(max_position_embeddings=40)).eval()
    engine = model_engine(model, CTX, EngineSize(sequences=4), max_queued=8)
    assert isinstance(engine, EngineThread)
    prompt = (7, 3, 9, 1)
    engine.start()
    scores = run(scores_of(engine, prompt))
    assert engine.stop()
    logits = model(torch.tensor([prompt]))[:, 0, : TINY_VOCAB.true].detach()
    expected = logits.log_softmax(dim=-1)
    for place, score in enumerate(scores):
        assert score.logprob == pytest.approx(float(expected[place, prompt[place + 1]]), abs=CLOSE)
        assert [token for token, _ in score.top] == expected[place].topk(2).indices.tolist()
    assert len(scores) == len(prompt) - 1


def test_a_prompt_that_comes_again_is_counted_as_found_in_the_cache() -> None:
    """Prompts of 40 tokens, whose first block of 32 is found when another one begins like it."""
    vocabulary = VocabSize(true=257, padded=260)
    model = tiny_model(tiny_config(max_position_embeddings=64), tiny_build(vocab=vocabulary)).eval()
    engine = model_engine(model, CTX, EngineSize(sequences=4), max_queued=8)

    async def ask() -> tuple[list[Reply], Reply]:
        engine.start()
        app = app_of(engine, model=served_model(context_length=64))
        body = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
        replies = []
        for end, changes in (("a", {}), ("b", {}), ("c", {"echo": True, "logprobs": 0})):
            body["prompt"] = "x" * 39 + end
            replies.append(await call(app, "POST", "/v1/completions", body | changes))
        return replies, await call(app, "GET", "/metrics")

    replies, metrics = run(ask())
    assert engine.stop()
    details = [reply.json["usage"]["prompt_tokens_details"] for reply in replies]
    assert details == [{"cached_tokens": found} for found in (0, 32, 0)]
    numbers = metrics.body.decode()
    assert 'megatron_prefix_cache_queries_total{model_name="tiny"} 80.0' in numbers
    assert 'megatron_prefix_cache_hits_total{model_name="tiny"} 32.0' in numbers


def test_sequences_longer_than_the_model_are_refused() -> None:
    model = tiny_model(tiny_config(max_position_embeddings=40))
    with pytest.raises(ConfigError, match="not that of the model") as caught:
        model_engine(model, CTX, EngineSize(length=41), max_queued=1)
    assert caught.value.fix == "use --max-model-len 40"


def test_ranks_that_are_no_whole_replicas_are_refused() -> None:
    four = Launch(world_size=4, local_world_size=4)
    assert ranks_of_replica(four, tp=2, ep=1) == 2
    assert ranks_of_replica(four, tp=1, ep=4) == 4
    assert ranks_of_replica(four, tp=2, ep=2) == 4
    assert ranks_of_replica(four, tp=2, ep=2, etp=1) == 2
    assert ranks_of_replica(four, tp=2, ep=2, etp=1, pp=2) == 4
    with pytest.raises(ConfigError, match="no whole replicas of the model") as caught:
        ranks_of_replica(Launch(world_size=3, local_world_size=3), tp=2, ep=1)
    assert caught.value.fix == "start 2 ranks for each replica"
    ranks_of_replica(Launch(world_size=8, local_world_size=8), tp=2, pp=2, ep=1)
    with pytest.raises(ConfigError, match="no whole replicas of the model") as caught:
        ranks_of_replica(Launch(world_size=6, local_world_size=6), tp=2, pp=2, ep=1)
    assert "--pipeline-model-parallel-size 2" in (caught.value.found or "")


def test_ranks_of_several_machines_are_refused() -> None:
    with pytest.raises(ConfigError, match="on several machines") as caught:
        ranks_of_replica(Launch(world_size=4, local_world_size=2), tp=2, ep=1)
    assert caught.value.found == "2 of 4 ranks on this one"


def test_the_pool_is_as_large_as_asked_for_or_as_all_sequences_need() -> None:
    model = tiny_model(tiny_config(max_position_embeddings=40))
    for blocks, expected in ((5, 5), (None, 3 * 2)):
        size = EngineSize(sequences=3, blocks=blocks)
        engine = model_engine(model, CTX, size, max_queued=1)
        assert isinstance(engine, EngineThread)
        assert engine.status().blocks == expected


def test_the_blocks_of_a_draft_model_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tiny_config(max_position_embeddings=40))
    speculation = Speculation(2, tiny_model(tiny_config(max_position_embeddings=40)))
    of_one = speculation.block_bytes
    assert of_one == model_block_bytes(model, CTX)
    for memory in ("megatron.device", "megatron.serving.engine.model_engine"):
        monkeypatch.setattr(f"{memory}.free_memory_bytes", lambda: of_one * 10)
    monkeypatch.setattr("megatron.inference.cache_size.step_bytes", lambda *_, **__: 0)
    for blocks, known in ((9, Speculation(2)), (4, speculation)):
        engine = model_engine(model, CTX, EngineSize(), max_queued=1, speculation=known)
        assert engine.status().blocks == blocks
    with pytest.raises(MachineError, match="do not fit into memory"):
        model_engine(model, CTX, EngineSize(blocks=9), max_queued=1, speculation=speculation)


def test_speculation_without_tokens_or_with_another_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tokens are to be proposed") as caught:
        Speculation(0)
    assert caught.value.found == "--speculative-tokens 0"
    model = tiny_model(tiny_config(max_position_embeddings=40))
    others = tiny_model(
        tiny_config(max_position_embeddings=40), tiny_build(vocab=VocabSize(51, 56))
    )
    with pytest.raises(ConfigError, match="the draft model has another vocabulary"):
        model_engine(model, CTX, EngineSize(), max_queued=1, speculation=Speculation(2, others))


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


def test_a_prefix_lm_is_served_as_it_generates() -> None:
    """Five prompts on blocks for two, in steps that a prompt fills."""
    model = varied_model(max_position_embeddings=46)
    prompts = [(*range(length), 7) for length in (33, 5, 0, 20, 31)]
    causal = [alone(model, prompt) for prompt in prompts]
    model.prompt_is_prefix = True
    expected = [alone(model, prompt) for prompt in prompts]
    assert sum(one != other for one, other in zip(causal, expected)) > 1
    size = EngineSize(sequences=4, step_tokens=4, blocks=4)
    engine = model_engine(model, CTX, size, max_queued=8)
    tokens = run(tokens_of(engine, prompts))
    assert engine.stop()
    assert tokens == expected
