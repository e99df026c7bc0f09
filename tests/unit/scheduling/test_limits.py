"""Tests of megatron.scheduling.limits."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.requests import Request, RequestError
from tests.support.examples import examples

LIMITS = SchedulerLimits(blocks=10, block_size=4, max_length=50, vocab_size=7, max_sequences=5)


def request(prompt: int, new: int, samples: int = 1, **others: frozenset[int]) -> Request:
    return Request(
        id="a", prompt=(1,) * prompt, max_new_tokens=new, samples=samples, arrival_ns=0, **others
    )


@pytest.mark.parametrize("name", ["blocks", "block_size", "max_length", "max_sequences"])
def test_an_engine_without_anything_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} of a scheduler is too small"):
        dataclasses.replace(LIMITS, **{name: 0})


def test_a_step_has_a_token_for_every_sequence() -> None:
    with pytest.raises(ConfigError, match="fewer tokens than sequences"):
        dataclasses.replace(LIMITS, max_tokens_per_step=4)


@examples(400)
@given(
    blocks=st.integers(1, 30),
    size=st.integers(1, 6),
    prompt=st.integers(1, 40),
    samples=st.integers(1, 4),
)
def test_the_longest_answer_is_the_longest_that_fits(
    blocks: int, size: int, prompt: int, samples: int
) -> None:
    limits = dataclasses.replace(LIMITS, blocks=blocks, block_size=size, max_length=60)
    longest = limits.longest_answer(prompt, samples)
    assert longest == 0 or limits.worst_case_blocks(prompt, longest, samples) <= blocks
    fits_one_more = limits.worst_case_blocks(prompt, longest + 1, samples) <= blocks
    assert not fits_one_more or prompt + longest + 1 > 60


def test_what_never_fits_is_refused_with_what_would() -> None:
    LIMITS.check_request(request(21, 20))
    with pytest.raises(RequestError, match="longer than the model") as refused:
        LIMITS.check_request(request(21, 21))
    assert refused.value.found == (
        "21 tokens of prompt and 21 new ones in 1 samples: 42 of 50 positions, 11 of 10 blocks"
    )
    assert refused.value.fix == "ask for 20 new tokens or fewer"
    with pytest.raises(RequestError, match="longer than the model") as refused:
        LIMITS.check_request(request(41, 1))
    assert refused.value.fix == "shorten the prompt"


def test_a_prompt_without_an_answer_may_be_as_long_as_the_model() -> None:
    LIMITS.check_request(request(40, 0))
    for prompt, blocks in ((41, 10), (51, 30)):
        limits = dataclasses.replace(LIMITS, blocks=blocks)
        with pytest.raises(RequestError, match="longer than the model") as refused:
            limits.check_request(request(prompt, 0))
        assert refused.value.fix == "shorten the prompt"
    dataclasses.replace(LIMITS, blocks=30).check_request(request(50, 0))


def test_more_likeliest_tokens_than_there_are_are_refused() -> None:
    scored = Request(id="a", prompt=(1,), max_new_tokens=1, arrival_ns=0, prompt_logprobs=7)
    LIMITS.check_request(scored)
    with pytest.raises(RequestError, match="not as many tokens as log-probabilities"):
        LIMITS.check_request(dataclasses.replace(scored, prompt_logprobs=8))


def test_a_prefix_is_computed_in_one_step_and_has_no_scores() -> None:
    limits = dataclasses.replace(LIMITS, prompt_is_prefix=True, max_tokens_per_step=9)
    limits.check_request(request(9, 4))
    with pytest.raises(RequestError, match="see each other is longer than a step"):
        limits.check_request(request(10, 4))
    scored = dataclasses.replace(request(9, 4), prompt_logprobs=0)
    with pytest.raises(RequestError, match="see those behind them have no log-probabilities"):
        limits.check_request(scored)


def test_samples_share_the_blocks_of_their_prompt() -> None:
    LIMITS.check_request(request(21, 4, samples=5))  # 5 shared blocks, one of each sample
    with pytest.raises(RequestError, match="longer than the model"):
        LIMITS.check_request(request(21, 5, samples=5))
    with pytest.raises(RequestError, match="more samples than sequences"):
        LIMITS.check_request(request(1, 1, samples=6))


@pytest.mark.parametrize("token", [-1, 7])
def test_a_token_outside_of_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(RequestError, match="stop_tokens has a token that the vocabulary does"):
        LIMITS.check_request(request(1, 1, stop_tokens=frozenset({token})))
    wrong = Request(id="a", prompt=(1, token), max_new_tokens=1, arrival_ns=0)
    with pytest.raises(RequestError, match="prompt has a token that the vocabulary does not"):
        LIMITS.check_request(wrong)
