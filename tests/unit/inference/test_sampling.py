"""Draws: their distribution, what they depend on, and what they do not."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from megatron.errors import ConfigError
from megatron.inference import sampling
from megatron.inference.sampling import SequenceDraw, check_draw, draw_tokens, probabilities
from megatron.inference.sampling_params import SamplingParams
from tests.support.examples import examples

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0], [0.0, 0.0, 5.0, 0.0, 0.0]])
WIDE = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)) * 2

LIMITS: list[dict[str, Any]] = [
    {},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"top_k": 4, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7},
]


def drawn(logits: Tensor, count: int, **values: Any) -> list[int]:
    """Draw `count` tokens from one row, each for another sequence."""
    params = SamplingParams(**values)
    draws = [SequenceDraw(params=params, seed=1, sequence=number) for number in range(count)]
    return draw_tokens(logits.expand(count, -1), draws, [3] * count).tolist()


def test_without_limits_the_distribution_is_the_softmax() -> None:
    torch.testing.assert_close(probabilities(LOGITS, SamplingParams()), LOGITS.softmax(-1))
    halved = probabilities(LOGITS, SamplingParams(temperature=2.0))
    torch.testing.assert_close(halved, (LOGITS / 2).softmax(-1))


def test_top_k_keeps_exactly_k_even_among_equals() -> None:
    for k in (1, 2, 4):
        kept = probabilities(LOGITS, SamplingParams(top_k=k))
        assert (kept > 0).sum(-1).tolist() == [k, k]
        torch.testing.assert_close(kept.sum(-1), torch.ones(2))
    everything = probabilities(LOGITS, SamplingParams(top_k=100))
    torch.testing.assert_close(everything, LOGITS.softmax(-1))


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, count in ((0.4, 1), (0.6, 2), (0.79, 2), (0.9, 3), (0.99, 4), (0.0, 4), (1.0, 4)):
        kept = probabilities(logits, SamplingParams(top_p=top_p))
        assert (kept > 0).sum().item() == count, top_p
        torch.testing.assert_close(kept.sum(-1), torch.ones(1))
    two = probabilities(logits, SamplingParams(top_p=0.6))
    torch.testing.assert_close(two[0, :2], torch.tensor([0.5 / 0.8, 0.3 / 0.8]))


def test_top_p_is_a_share_of_the_top_k() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    kept = probabilities(logits, SamplingParams(top_k=2, top_p=0.5))  # 0.4 of 0.7 reaches it
    assert (kept > 0).tolist() == [[True, False, False, False]]


def test_min_p_keeps_what_is_so_many_times_as_likely_as_the_likeliest() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for min_p, count in ((0.0, 4), (0.05, 4), (0.2, 3), (0.4, 2), (0.7, 1), (1.0, 1)):
        kept = probabilities(logits, SamplingParams(min_p=min_p))
        assert (kept > 0).sum().item() == count, min_p


# The 99.9th percentile of chi-square for 1 to 4 degrees of freedom (Abramowitz and Stegun,
# table 26.8): draws have fixed seeds, so that the test gives one result.
CRITICAL = {0: 0.0, 1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47}
DRAWS = 4000


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_draws_follow_the_distribution(limits: dict[str, Any]) -> None:
    expected = probabilities(LOGITS[:1], SamplingParams(**limits))[0].tolist()
    counts = Counter(drawn(LOGITS[:1], DRAWS, **limits))
    assert all(expected[token] > 0 for token in counts)
    possible = [token for token, share in enumerate(expected) if share > 0]
    statistic = sum(
        (counts[token] - DRAWS * expected[token]) ** 2 / (DRAWS * expected[token])
        for token in possible
    )
    assert statistic <= CRITICAL[len(possible) - 1]


@pytest.mark.parametrize(
    "limits", [{"top_k": 5}, {"top_p": 0.99}, {"top_k": 300, "top_p": 0.5}, {"min_p": 1e-3}],
    ids=str,
)  # fmt: skip
def test_few_candidates_give_the_draws_of_the_sorted_vocabulary(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]
) -> None:
    # Only the rounding of the sum over all tokens may differ, by less than any of these draws.
    found = []
    for candidates in (16, 256, 1000):
        monkeypatch.setattr(sampling, "_CANDIDATES", candidates)
        found.append(drawn(WIDE, 60, **limits))
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) > 1


def test_a_draw_depends_on_seed_sequence_position_and_choice_alone() -> None:
    params = SamplingParams(temperature=5.0)

    def tokens(position: int = 3, **changes: int) -> list[int]:
        values = {"seed": 5, "sequence": 1, "choice": 0} | changes
        draws = [SequenceDraw(params=params, **values)]  # type: ignore[arg-type]
        return [int(draw_tokens(WIDE, draws, [at])) for at in range(position, position + 8)]

    before = tokens()
    assert tokens() == before
    for changes in ({"seed": 6}, {"sequence": 2}, {"choice": 1}, {"position": 20}):
        assert tokens(**changes) != before


@examples(30)
@given(st.lists(st.sampled_from(range(7)), min_size=1, max_size=9), st.integers(0, 8))
def test_other_rows_do_not_change_a_draw(kinds: list[int], at: int) -> None:
    rows = torch.randn(len(kinds), 300, generator=torch.Generator().manual_seed(len(kinds))) * 3
    at %= len(kinds)
    greedy = [SamplingParams(greedy=True, repetition_penalty=2.0)]
    choices = [SamplingParams(**values) for values in LIMITS] + greedy
    draws = [
        SequenceDraw(params=choices[kind], seed=1, sequence=row, prompt=(1, 2), output=(3,))
        for row, kind in enumerate(kinds)
    ]
    positions = list(range(len(kinds)))
    alone = draw_tokens(rows[at : at + 1], draws[at : at + 1], positions[at : at + 1])
    assert int(alone) == int(draw_tokens(rows, draws, positions)[at])


def test_uniforms_are_spread_evenly() -> None:
    found = [SequenceDraw(seed=0, sequence=s).uniform(p) for s in range(50) for p in range(50)]
    assert all(0 <= each < 1 for each in found)
    counts = Counter(int(each * 5) for each in found)
    assert sum((counts[part] - 500) ** 2 / 500 for part in range(5)) <= CRITICAL[4]


def test_the_largest_uniform_draws_a_token_with_a_probability() -> None:
    weights = torch.tensor([[0.25, 0.75, 0.0]])
    largest = torch.tensor([1 - 2.0**-sampling._UNIFORM_BITS], dtype=torch.float64)
    assert sampling._inverse(weights, largest).tolist() == [1]
    assert sampling._inverse(torch.tensor([[0.0, 1.0]]), largest * 0).tolist() == [1]


def test_penalties_are_the_formulas() -> None:
    def changed(**values: Any) -> list[float]:
        params = SamplingParams(greedy=True, **values)
        draw = SequenceDraw(params=params, seed=0, prompt=(3, 0), output=(1, 1, 4))
        before = LOGITS.clone()
        found = sampling._changed_scores(LOGITS[:1], [draw])[0].tolist()
        assert torch.equal(LOGITS, before)
        return found

    assert changed() == [2.0, 1.0, 0.0, -1.0, -2.0]
    assert changed(repetition_penalty=2.0) == [1.0, 0.5, 0.0, -2.0, -4.0]
    assert changed(presence_penalty=0.5) == [2.0, 0.5, 0.0, -1.0, -2.5]
    assert changed(frequency_penalty=0.5) == [2.0, 0.0, 0.0, -1.0, -2.5]
    assert changed(logit_bias=((2, 9.0), (4, -1.0))) == [2.0, 1.0, 9.0, -1.0, -3.0]


def test_greedy_choice_is_after_penalties() -> None:
    draw = SequenceDraw(params=SamplingParams(greedy=True), seed=0, output=(0,))
    assert draw_tokens(LOGITS[:1], [draw], [1]).tolist() == [0]
    params = SamplingParams(greedy=True, presence_penalty=1.5)
    draw = SequenceDraw(params=params, seed=0, output=(0,))
    assert draw_tokens(LOGITS[:1], [draw], [1]).tolist() == [1]


def test_half_precision_scores_are_sampled_in_float32() -> None:
    assert probabilities(LOGITS.bfloat16(), SamplingParams()).dtype == torch.float32
    rounded = LOGITS[:1].bfloat16()
    assert drawn(rounded, 20) == drawn(rounded.float(), 20)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            SequenceDraw(params=SamplingParams(logit_bias=((50, 1.0),)), seed=0),
            "a bias is given for a token that is not in the vocabulary",
        ),
        (SequenceDraw(seed=0, top_logprobs=-1), "not as many tokens"),
        (SequenceDraw(seed=0, top_logprobs=51), "not as many tokens"),
    ],
)
def test_what_is_not_in_the_vocabulary_is_refused(draw: SequenceDraw, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_draw(draw, 50)
    check_draw(SequenceDraw(params=SamplingParams(logit_bias=((49, 1.0),)), seed=0), 50)


class Even:
    """Allows tokens of even ids behind outputs of at most two tokens."""

    def allowed(self, output: Sequence[int]) -> NDArray[np.bool_] | None:
        return None if len(output) > 2 else np.arange(LOGITS.shape[-1]) % 2 == 0


@pytest.mark.parametrize("values", [*LIMITS, {"greedy": True}, {"logit_bias": ((1, 50.0),)}])
def test_only_tokens_that_a_constraint_allows_are_drawn(values: dict[str, Any]) -> None:
    params, count = SamplingParams(**values), 40
    scores = LOGITS[:1].expand(count, -1).clone()
    free = [SequenceDraw(params=params, seed=1, sequence=number) for number in range(count)]
    bound = [replace(draw, constraint=Even()) for draw in free]
    assert {token % 2 for token in draw_tokens(scores, bound, [3] * count).tolist()} == {0}
    # Rows beside it stay as they are, and so does one whose output is not allowed itself.
    mixed = [free[0], bound[0], replace(bound[0], output=(1, 2, 3))]
    found = draw_tokens(scores[:3], mixed, [3] * 3).tolist()
    alone = draw_tokens(scores[:1], free[:1], [3]).tolist()
    assert found[::2] == alone * 2
    assert torch.equal(scores, LOGITS[:1].expand(count, -1))
