"""What is dropped against a slow reference, and that parts of sequences give what wholes do."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.config.experts import TokenDropPolicy
from megatron.model.experts.capacity import WholeSequences, capacity_of, within_capacity
from tests.support.examples import examples
from tests.support.models import tiny_build


def reference(
    chosen: Tensor, shares: Tensor, capacity: int, policy: TokenDropPolicy, experts: int
) -> Tensor:
    """Let each expert go through the choices of it, the best or the first ones first."""
    kept = torch.zeros_like(chosen, dtype=torch.bool)
    length, batch, taken = chosen.shape
    for sequence in range(batch):
        for expert in range(experts):
            queue = [
                (token, at)
                for token in range(length)
                for at in range(taken)
                if chosen[token, sequence, at] == expert
            ]
            if policy is TokenDropPolicy.PROBS:
                queue.sort(key=lambda one: -float(shares[one[0], sequence, one[1]]))
            for token, at in queue[:capacity]:
                kept[token, sequence, at] = True
    return kept


@examples(80)
@given(
    length=st.integers(1, 9),
    batch=st.integers(1, 3),
    experts=st.integers(2, 5),
    capacity=st.integers(1, 9),
    policy=st.sampled_from(TokenDropPolicy),
    levels=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_what_is_dropped_is_what_a_slow_reference_drops(
    length: int,
    batch: int,
    experts: int,
    capacity: int,
    policy: TokenDropPolicy,
    levels: int,
    seed: int,
) -> None:
    """With many equal shares too, of which the first in the sequence is taken."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(length, batch, experts, generator=generator)
    chosen = scores.topk(min(2, experts - 1), dim=-1).indices
    shares = torch.randint(0, levels, chosen.shape, generator=generator) / levels
    found = within_capacity(chosen, shares, capacity, policy, experts=experts)
    assert torch.equal(found, reference(chosen, shares, capacity, policy, experts))


@pytest.mark.parametrize(
    ("length", "taken", "experts", "factor", "least", "expected"),
    [(64, 2, 8, 1.0, 1, 16), (64, 2, 8, 1.01, 1, 17), (1, 2, 8, 1.0, 1, 1), (4, 1, 8, 0.5, 4, 4)],
)
def test_a_capacity_is_rounded_up_and_has_a_least_value(
    length: int, taken: int, experts: int, factor: float, least: int, expected: int
) -> None:
    found = capacity_of(length, taken, experts, factor, least)
    assert found == expected
    assert found >= math.floor(factor * length * taken / experts)


def test_a_rank_that_is_alone_holds_whole_sequences() -> None:
    sequences, some = WholeSequences(tiny_build()), torch.arange(12).view(4, 3)
    assert sequences.gather(some) is some
    assert torch.equal(sequences.own(some), some)
