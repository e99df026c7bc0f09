"""Which layers are recomputed together, and that a stage which does so changes no bit."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.config.activations import ActivationPolicy, RecomputeMethod
from megatron.config.model import PositionEmbedding
from megatron.model.activations import LayerGroup, plan_groups
from megatron.model.gpt_model import GPTModel
from megatron.model.stage import run_layers
from megatron.mpu.random import Samples
from tests.support.live_bytes import LiveBytes
from tests.support.models import roughen, tiny_build, tiny_config, tiny_tokens

UNIFORM, BLOCK = RecomputeMethod.UNIFORM, RecomputeMethod.BLOCK
POLICIES: dict[str, ActivationPolicy] = {
    "uniform": ActivationPolicy(method=UNIFORM),
    "uniform 2": ActivationPolicy(method=UNIFORM, num_layers=2),
    "uniform 9": ActivationPolicy(method=UNIFORM, num_layers=9),
    "block 2": ActivationPolicy(method=BLOCK, num_layers=2),
    "offload 2": ActivationPolicy(offload_layers=2),
    "offload 2, uniform 2": ActivationPolicy(method=UNIFORM, num_layers=2, offload_layers=2),
}

policies = st.builds(
    ActivationPolicy,
    method=st.sampled_from([None, UNIFORM, BLOCK]),
    num_layers=st.integers(1, 7),
    offload_layers=st.integers(0, 7),
)
stages = st.builds(
    lambda before, blocks, after: [False] * before + [True] * blocks + [False] * after,
    *(st.integers(0, 2), st.integers(0, 12), st.integers(0, 2)),
)


@given(stages, policies)
def test_groups_cover_the_stage_in_order_and_once(
    is_block: Sequence[bool], policy: ActivationPolicy
) -> None:
    plan = plan_groups(is_block, policy)
    assert [0, *(group.stop for group in plan)] == [
        *(group.start for group in plan),
        len(is_block),
    ]
    assert all(one.stop == other.start for one, other in pairwise(plan))
    assert all(group.start < group.stop for group in plan)


@given(stages, policies)
def test_only_transformer_layers_are_touched_and_as_many_as_were_asked_for(
    is_block: Sequence[bool], policy: ActivationPolicy
) -> None:
    plan, blocks = plan_groups(is_block, policy), sum(is_block)
    for group in plan:
        if group.recomputed or group.offloaded or group.stop - group.start > 1:
            assert all(is_block[group.start : group.stop])
    sizes = [group.stop - group.start for group in plan if group.recomputed]
    if policy.method is None:
        assert sizes == []
    elif policy.method is BLOCK:
        assert sizes == [1] * min(policy.num_layers, blocks)
        first = [group for group in plan if is_block[group.start]][: len(sizes)]
        assert all(group.recomputed for group in first)
    else:
        whole, rest = divmod(blocks, policy.num_layers)
        assert sizes == [policy.num_layers] * whole + [rest] * (rest > 0)
    covered = sum(group.stop - group.start for group in plan if group.offloaded)
    wanted = min(policy.offload_layers, blocks)
    assert wanted <= covered < wanted + max(policy.num_layers, 1)


def test_blocks_that_do_not_follow_each_other_are_not_one_group() -> None:
    plan = plan_groups([True, False, True, True], ActivationPolicy(method=UNIFORM, num_layers=4))
    assert plan == (
        LayerGroup(0, 1, recomputed=True),
        LayerGroup(1, 2),
        LayerGroup(2, 4, recomputed=True),
    )


def steps(policy: ActivationPolicy, **changes: Any) -> list[Tensor]:
    """Two micro-batches whose backward passes run in the other order, as a pipeline may do."""
    config = tiny_config(num_layers=5, hidden_dropout=0.3, attention_dropout=0.2, **changes)
    build = tiny_build(activations=policy)
    model = GPTModel(config, build)
    roughen(model, build.ctx)
    results, losses = [], []
    for seed in range(2):
        tokens = tiny_tokens(seed=seed)
        positions = torch.arange(9).expand(2, 9).roll(seed, 1).contiguous()
        documents = (torch.arange(9) > 3 + seed).long().expand(2, 9).contiguous()
        with build.streams.of(Samples(2 * seed, 2)):
            loss = model(tokens, positions, documents, labels=tokens).total
        losses.append(loss)
        results.append(loss.detach())
    for loss in reversed(losses):
        loss.backward()
    return [*results, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("position", ["learned_absolute", "alibi", "rope"])
@pytest.mark.parametrize("name", POLICIES)
def test_no_bit_changes_with_dropout_ids_and_passes_in_flight(name: str, position: str) -> None:
    kind = PositionEmbedding(position)
    plain = steps(ActivationPolicy(), position_embedding_type=kind)
    again = steps(POLICIES[name], position_embedding_type=kind)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def kept(policy: ActivationPolicy) -> int:
    """Bytes that the forward pass of four blocks, without embedding and head, leaves."""
    config, build = tiny_config(num_layers=4), tiny_build(activations=policy)
    model = GPTModel(config, build)
    hidden = torch.randn(9, 2, 16, dtype=torch.float64, requires_grad=True)
    with LiveBytes([*model.parameters(), hidden]) as live:
        (output,) = run_layers(model, model.specs[1:5], (hidden,))
        assert output.requires_grad
        return live.count


def test_the_larger_the_groups_the_less_is_kept() -> None:
    one = 9 * 2 * 16 * 8  # bytes of one [s, b, h] in float64
    layer = kept(ActivationPolicy()) / 4
    assert layer > 12 * one
    for num_layers, inputs in ((1, 3), (2, 1), (4, 0)):  # the first input was there before
        policy = ActivationPolicy(method=UNIFORM, num_layers=num_layers)
        # What is left beside inputs and the output are a few states of generators.
        assert (inputs + 1) * one <= kept(policy) < (inputs + 1) * one + layer / 2, num_layers
    sizes = [kept(ActivationPolicy(method=BLOCK, num_layers=n)) for n in range(1, 5)]
    assert all(before - after > layer / 2 for before, after in pairwise(sizes))


def test_nothing_is_recomputed_in_evaluation() -> None:
    build = tiny_build(activations=POLICIES["uniform 2"])
    model, tokens = GPTModel(tiny_config(hidden_dropout=0.5), build), tiny_tokens()
    roughen(model, build.ctx)
    plain = dataclasses.replace(build, activations=ActivationPolicy())
    reference = GPTModel(tiny_config(), plain)
    roughen(reference, build.ctx)
    with torch.no_grad(), build.streams.of(None):  # nothing is drawn
        model.eval()
        carry = model(tokens)
        expected = reference(tokens)
    assert torch.equal(carry, expected)
