"""Requests and events come out of their texts as they went in; other texts are refused."""

import math
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.serving.engine_client import (
    EngineRequest,
    PromptScored,
    SamplingOptions,
    TokenDrawn,
    TokenScore,
)
from megatron.serving.ranks.payloads import (
    PayloadError,
    decode_event,
    decode_request,
    encode_event,
    encode_request,
)
from tests.support.examples import examples

SMALL = st.integers(0, 1 << 20)
SCORE = st.builds(
    TokenScore,
    st.floats(allow_nan=False),
    st.lists(st.tuples(SMALL, st.floats(allow_nan=False))).map(tuple),
)
FINISHES = st.sampled_from([None, "stop", "length"])


@examples(60)
@given(st.builds(TokenDrawn, SMALL, SMALL, st.none() | SCORE, FINISHES))
def test_a_token_arrives_as_it_was_drawn(event: TokenDrawn) -> None:
    assert decode_event(encode_event(event)) == event


def test_scores_of_a_prompt_arrive_also_where_they_are_infinite() -> None:
    event = PromptScored((TokenScore(-math.inf, ((3, -0.5),)), TokenScore(-1.0)))
    assert decode_event(encode_event(event)) == event


def test_a_request_arrives_with_all_that_it_asks_for() -> None:
    sampling = SamplingOptions(
        temperature=0.5, seed=(1 << 62) + 1, logit_bias=MappingProxyType({7: -math.inf, 9: 2.0})
    )
    request = EngineRequest(
        id="a",
        prompt=tuple(range(3000)),
        max_new_tokens=7,
        samples=2,
        stop_tokens=frozenset({4, 5}),
        deadline_ns=1 << 60,
        salt=b"\x00salt",
        sampling=sampling,
        logprobs=3,
    )
    assert decode_request(encode_request(request)) == request
    plain = EngineRequest(id="b", prompt=(1,), max_new_tokens=1)
    assert decode_request(encode_request(plain)) == plain


@pytest.mark.parametrize("text", ["", "?", "gA==", encode_event(TokenDrawn(0, 1))])
def test_a_text_that_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(PayloadError, match="a text is no request or event of an engine"):
        decode_request(text)


def test_a_text_without_an_event_is_refused() -> None:
    with pytest.raises(PayloadError, match="no request or event") as caught:
        decode_event("gA==")
    assert caught.value.found == "neither a token nor the scores of a prompt"
