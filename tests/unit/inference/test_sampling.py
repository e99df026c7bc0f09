"""Sampling: its limits, its distribution, its refusals."""

from typing import Any

import pytest
import torch

from megatron.errors import ConfigError
from megatron.inference.sampling import SamplingParams, probabilities, sample

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0], [0.0, 0.0, 5.0, 0.0, 0.0]])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_greedy_takes_the_likeliest_and_draws_nothing() -> None:
    drawn = generator()
    before = drawn.get_state()
    assert sample(LOGITS, SamplingParams(greedy=True), drawn).tolist() == [0, 2]
    assert torch.equal(drawn.get_state(), before)


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


def test_draws_follow_the_distribution_and_the_seed() -> None:
    many = LOGITS[:1].expand(20_000, 5)
    params = SamplingParams(top_k=3)
    drawn = sample(many, params, generator(1))
    share = torch.bincount(drawn, minlength=5) / 20_000
    # 20,000 draws: a share is known to 0.0036.
    torch.testing.assert_close(share, probabilities(LOGITS, params)[0], rtol=0, atol=0.015)
    assert torch.equal(drawn, sample(many, params, generator(1)))
    assert not torch.equal(drawn, sample(many, params, generator(2)))


def test_half_precision_scores_are_sampled_in_float32() -> None:
    assert probabilities(LOGITS.bfloat16(), SamplingParams()).dtype == torch.float32


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.0}, "temperature is not a positive number"),
        ({"temperature": -1.0}, "temperature is not a positive number"),
        ({"temperature": float("nan")}, "temperature is not a positive number"),
        ({"temperature": float("inf")}, "temperature is not a positive number"),
        ({"top_k": -1}, "number of candidate tokens is negative"),
        ({"top_p": 1.5}, "outside \\[0, 1\\]"),
        ({"greedy": True, "top_k": 5}, "leaves nothing to sample"),
    ],
)
def test_values_without_a_meaning_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**values)
