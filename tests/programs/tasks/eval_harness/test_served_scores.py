"""The harness gets the scores over HTTP that its adapter computes in this process."""

import asyncio
import json
from typing import Any

from lm_eval.models.openai_completions import LocalCompletionsAPI

from megatron.initialize import shutdown_megatron
from megatron.serving.app import server_app
from megatron.serving.engine.model_engine import EngineSize, model_engine
from megatron.tokenizer.token_text import text_rules
from tasks.eval_harness.adapter import MegatronLM
from tasks.loading import load_scorer
from tests.support.ranks import run_on_ranks
from tests.support.serving.calls import backend_of, call
from tests.support.serving.models import served_model

PAIRS = [("the cat", " sat"), ("a dog ran ", "to the cat"), ("it", " was a fine day for a cat")]
# Sums of up to 24 log-probabilities; in float32, by products in other orders.
CLOSE = 1e-4


def scores_both_ways(folder: str) -> tuple[list[tuple[float, bool]], list[tuple[float, bool]]]:
    """A body for `run_on_ranks`: what the adapter computes, and what a client reads."""
    loaded = load_scorer(folder)
    adapter = MegatronLM(loaded)
    pairs = [tuple(adapter.tok_encode(text) for text in pair) for pair in PAIRS]
    expected = adapter._loglikelihood_tokens(
        [(texts, context, rest) for texts, (context, rest) in zip(PAIRS, pairs)]
    )
    assert loaded.model is not None
    engine = model_engine(
        loaded.model, loaded.ctx, EngineSize(step_tokens=16, sequences=4), max_queued=4
    )
    model = served_model(
        tokenizer=loaded.tokenizer,
        rules=text_rules(loaded.tokenizer),
        vocab_size=loaded.model.build.vocab.true,
        context_length=engine.max_length,
    )

    async def ask(body: dict[str, Any]) -> Any:
        engine.start()
        app = server_app(backend_of(engine, model=model))
        return json.loads((await call(app, "POST", "/v1/completions", body)).body)

    harness = object.__new__(LocalCompletionsAPI)
    harness.model = "tiny"
    tokens = [[*context, *rest] for context, rest in pairs]
    answer = asyncio.run(ask(harness._create_payload(tokens)))
    assert engine.stop()
    shutdown_megatron()
    contexts = [len(context) for context, _ in pairs]
    return expected, harness.parse_logprobs(answer, tokens=tokens, ctxlens=contexts)


def test_log_likelihoods_over_http_are_those_of_the_adapter(tiny_gpt: str) -> None:
    ((expected, found),) = run_on_ranks(1, scores_both_ways, tiny_gpt)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    for (one, _), (other, _) in zip(found, expected, strict=True):
        assert abs(one - other) <= CLOSE
