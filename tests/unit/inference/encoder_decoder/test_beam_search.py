"""Beam search against a naive version; `test_generate` compares it with transformers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.inference.encoder_decoder.beam_search import (
    BeamParams,
    BeamSearch,
    BeamStep,
    EarlyStopping,
)
from tests.support.examples import examples

EOD = 3
VOCABULARY = 12
MOST = 5
CLOSE = 1e-5  # totals are summed in float32 here, in Python there


def table(seed):
    """Return log-probabilities [n, v, v] of each token at each place behind each other one.

    Those of places differ, or else sequences of the same steps in another order would be a tie.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(MOST, VOCABULARY, VOCABULARY, generator=generator).mul(2).log_softmax(-1)


def searched(following, params, *, eod=EOD, most=MOST):
    """Run a search in which place and last token decide; token 0 stands before the first."""
    search = BeamSearch(params, max_new_tokens=most, eod=eod, vocabulary=VOCABULARY)
    last = [0] * params.beams
    steps = []
    while (step := search.advance(following[len(steps), last])) is not None:
        last = list(step.tokens)
        steps.append(step)
    return search.ended, steps


def naive(following, params, *, eod=EOD, most=MOST):
    """The same from all continuations, sorted, with whole sequences instead of beams."""
    running, ended = {(): 0.0}, []
    for length in range(1, most + 1):
        every = [
            (total + float(following[length - 1, (0, *tokens)[-1], token]), (*tokens, token))
            for tokens, total in running.items()
            for token in range(VOCABULARY)
        ]
        every = sorted(every, reverse=True)[: 2 * params.beams]
        is_end = [tokens[-1] == eod or length == most for _, tokens in every]
        ended += [
            (total / length**params.length_penalty, tokens)
            for (total, tokens), ends in list(zip(every, is_end))[: params.beams]
            if ends
        ]
        ended = sorted(ended, reverse=True)[: params.beams]
        left = [each for each, ends in zip(every, is_end) if not ends][: params.beams]
        running = {tokens: total for total, tokens in left}
        if len(ended) == params.beams and left:
            compared = length
            if params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0:
                compared = most
            best = left[0][0] / compared**params.length_penalty
            if params.early_stopping is EarlyStopping.ALL_ENDED or best <= ended[-1][0]:
                break
    return ended


@examples(60)
@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.sampled_from([-1.0, 0.0, 1.0, 2.5]),
    st.sampled_from(EarlyStopping),
    st.sampled_from([EOD, None]),
)
def test_the_sequences_are_those_of_a_naive_search(seed, beams, penalty, stopping, eod):
    params = BeamParams(beams=beams, length_penalty=penalty, early_stopping=stopping)
    found, _ = searched(table(seed), params, eod=eod)
    expected = naive(table(seed), params, eod=eod)
    assert [each.tokens for each in found] == [tokens for _, tokens in expected]
    scores = [score for score, _ in expected]
    assert [each.score for each in found] == pytest.approx(scores, abs=CLOSE)


def test_one_beam_is_the_greedy_choice():
    following = table(5)
    (best,), _ = searched(following, BeamParams(beams=1), eod=None)
    greedy = []
    for place in range(MOST):
        greedy.append(int(following[place, greedy[-1] if greedy else 0].argmax()))
    assert list(best.tokens) == greedy


def test_before_the_first_token_all_beams_are_one():
    following = torch.full((VOCABULARY, VOCABULARY), -9.0)
    following[0, 4:8] = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    params = BeamParams(beams=2)
    search = BeamSearch(params, max_new_tokens=MOST, eod=EOD, vocabulary=VOCABULARY)
    assert search.advance(following[[0, 0]]) == BeamStep((0, 0), (4, 5))


def test_an_end_behind_the_best_beams_ends_nothing():
    following = torch.full((VOCABULARY, VOCABULARY), -9.0)
    following[0, [4, 5, EOD, 6]] = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    params = BeamParams(beams=2)
    search = BeamSearch(params, max_new_tokens=MOST, eod=EOD, vocabulary=VOCABULARY)
    search.advance(following[[0, 0]])
    assert search.ended == []


def test_a_longer_sequence_that_would_be_better_is_missed_unless_never():
    following = torch.full((VOCABULARY, VOCABULARY), -9.0)
    following[0, EOD], following[0, 4], following[4, 4] = -0.7, -0.8, 0.0
    found = {
        stopping: searched(
            following.expand(MOST, -1, -1),
            BeamParams(beams=1, length_penalty=2.0, early_stopping=stopping),
        )[0][0].tokens
        for stopping in EarlyStopping
    }
    assert found.pop(EarlyStopping.NEVER) == (4,) * MOST
    assert set(found.values()) == {(EOD,)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beams": 0}, "the number of beams is not positive"),
        ({"beams": 2, "length_penalty": float("nan")}, "power of the length"),
    ],
)
def test_values_out_of_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        BeamParams(**changes)


def test_more_candidates_than_tokens_are_refused():
    with pytest.raises(ConfigError, match="more candidates than there are tokens") as raised:
        BeamSearch(BeamParams(beams=7), max_new_tokens=1, eod=None, vocabulary=VOCABULARY)
    assert "--num-beams 6 or fewer" in str(raised.value)
