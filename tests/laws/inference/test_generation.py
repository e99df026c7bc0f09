"""What the engine generates and scores beside other requests is what the model computes at once.

Greedy choice without a cache is the measure of tokens, `transformers` that of log-probabilities.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.source import SourceOptions
from megatron.config.model import PositionEmbedding
from megatron.model.gpt_model import GPTModel
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.requests import Request
from tests.support.checkpoints.hf_models import (
    LOGITS,
    VOCABULARY,
    hf_model,
    our_model,
    save_case,
    tokens,
)
from tests.support.examples import examples
from tests.support.inference.engine_loop import executor_of, run_engine
from tests.support.models import TINY_VOCAB, varied_model

GQA = {"num_query_groups": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama, groups": GQA | {"position_embedding_type": PositionEmbedding.ROPE, "swiglu": True},
    "alibi, windows": {"position_embedding_type": PositionEmbedding.ALIBI, "sliding_window": 5},
    "experts": GQA | {"num_experts": 4, "swiglu": True, "ffn_hidden_size": 24},
}
LONGEST = 24


@cache
def model_of(kind: str) -> GPTModel:
    return varied_model(max_position_embeddings=LONGEST, **MODELS[kind])


@cache
@torch.no_grad()
def greedy(kind: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """Return what greedy choice continues a prompt with, everything computed for every token."""
    text = list(prompt)
    for _ in range(count):
        logits: Tensor = model_of(kind)(torch.tensor([text]))[-1, 0, : TINY_VOCAB.true]
        text.append(int(logits.argmax()))
    return text[len(prompt) :]


@st.composite
def loads(draw: st.DrawFn) -> list[Request]:
    """Requests of prompts that begin alike, of which some are scored and some have samples."""
    requests = []
    for number in range(draw(st.integers(1, 5))):
        length, new = draw(st.integers(1, 12)), draw(st.integers(0, 9))
        last = draw(st.integers(0, 2))
        requests.append(
            Request(
                id=str(number),
                prompt=(*((7 * at + 3) % 50 for at in range(length - 1)), last),
                max_new_tokens=new,
                samples=draw(st.integers(1, 2)) if new else 1,
                prompt_logprobs=draw(st.none() | st.just(1)),
                arrival_ns=0,
            )
        )
    return requests


@examples(40)
@given(st.sampled_from(list(MODELS)), loads(), st.integers(0, 14), st.integers(5, 16))
def test_tokens_are_those_of_greedy_choice_without_a_cache(
    kind: str, requests: list[Request], spare: int, step_tokens: int
) -> None:
    """On pools of so few blocks that requests wait for them and lose them."""
    limits = SchedulerLimits(
        blocks=12 + spare,
        block_size=4,
        max_length=LONGEST,
        vocab_size=TINY_VOCAB.true,
        max_tokens_per_step=step_tokens,
        max_sequences=5,
        watermark_blocks=0,
    )
    run = run_engine(executor_of(model_of(kind), limits), requests, limits)
    for request in requests:
        expected = greedy(kind, request.prompt, request.max_new_tokens)
        assert run.tokens[request.id] == [expected] * request.samples
        scored = 0 if request.prompt_logprobs is None else len(request.prompt) - 1
        assert len(run.targets[request.id]) == scored


@pytest.mark.parametrize("kind", MODELS)
def test_what_models_generate_depends_on_the_prompt(kind: str) -> None:
    """A property of a model that repeats one token would hold whatever is wrong."""
    texts = [greedy(kind, (*range(length), 7), 6) for length in (0, 3, 5, 9)]
    assert len({tuple(text) for text in texts}) == len(texts)
    assert len({token for text in texts for token in text}) >= 5


def test_requests_of_this_size_do_lose_their_blocks() -> None:
    """What the property draws from does preempt."""
    prompt = tuple(range(12))
    requests = [
        Request(id=str(at), prompt=(at, *prompt[1:]), max_new_tokens=9, arrival_ns=0)
        for at in range(4)
    ]
    limits = SchedulerLimits(
        blocks=12, block_size=4, max_length=LONGEST, vocab_size=TINY_VOCAB.true, watermark_blocks=0
    )
    assert run_engine(executor_of(model_of("gpt2"), limits), requests, limits).preemptions > 0


WIDE = SchedulerLimits(
    blocks=30, max_length=64, vocab_size=VOCABULARY, max_tokens_per_step=13, max_sequences=4
)


def scores_of(model: GPTModel) -> list[list[float]]:
    """Return the log-probabilities of the prompts `tokens()`, computed in parts side by side."""
    requests = [
        Request(id=str(row), prompt=tuple(ids), max_new_tokens=0, arrival_ns=0, prompt_logprobs=0)
        for row, ids in enumerate(tokens().tolist())
    ]
    run = run_engine(executor_of(model, WIDE), requests, WIDE)
    return [[each.chosen for each in run.targets[request.id]] for request in requests]


@pytest.mark.parametrize("case", ["gpt2", "llama", "llama 3.1", "mistral", "gpt_neox", "mixtral"])
def test_log_probabilities_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    with torch.no_grad():
        logits = hf_model(case)(tokens()).logits.log_softmax(-1)
    expected = logits[:, :-1].gather(2, tokens()[:, 1:, None])[..., 0]
    source = HuggingFaceSource(save_case(case, tmp_path), SourceOptions())
    found = torch.tensor(scores_of(our_model(source)))
    torch.testing.assert_close(found, expected, rtol=LOGITS, atol=LOGITS)
    swapped = our_model(
        source, lambda name, tensor: tensor.flip(0) if "layers.1" in name else tensor
    )
    assert (torch.tensor(scores_of(swapped)) - expected).abs().max() > 1000 * LOGITS
