"""Values of sampling that have no meaning are refused."""

from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.inference.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.0}, "temperature is not a positive number"),
        ({"temperature": -1.0}, "temperature is not a positive number"),
        ({"temperature": float("nan")}, "temperature is not a positive number"),
        ({"temperature": float("inf")}, "temperature is not a positive number"),
        ({"top_k": -1}, "number of candidate tokens is negative"),
        ({"top_p": 1.5}, "outside \\[0, 1\\]"),
        ({"min_p": -0.1}, "least probability of a candidate token"),
        ({"min_p": 1.1}, "least probability of a candidate token"),
        ({"repetition_penalty": 0.0}, "penalty of repeated tokens is not a positive number"),
        ({"repetition_penalty": float("inf")}, "penalty of repeated tokens is not a positive"),
        ({"presence_penalty": float("nan")}, "generated tokens is not a finite number"),
        ({"frequency_penalty": float("inf")}, "generated tokens is not a finite number"),
        ({"logit_bias": ((-1, 1.0),)}, "bias of a token cannot be added"),
        ({"logit_bias": ((1, float("-inf")),)}, "bias of a token cannot be added"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "a token has two biases"),
        ({"greedy": True, "top_k": 5}, "leaves nothing to sample"),
        ({"greedy": True, "min_p": 0.5}, "leaves nothing to sample"),
    ],
)
def test_values_without_a_meaning_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**values)


def test_what_needs_other_tokens_or_the_order_of_scores_is_known() -> None:
    assert not SamplingParams(top_p=1.0).has_limits
    assert SamplingParams(min_p=0.1).has_limits
    assert not SamplingParams(logit_bias=((1, 1.0),)).has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
    assert not SamplingParams(repetition_penalty=1.1).has_output_penalties


def test_equal_values_are_one_key() -> None:
    biases = ((1, 1.0),)
    assert len({SamplingParams(logit_bias=biases), SamplingParams(logit_bias=biases)}) == 1
