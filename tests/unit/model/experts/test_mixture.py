"""Experts against a loop over tokens, value by value and gradient by gradient."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.config.experts import MlpType, RouterScoreFunction
from megatron.config.fp8 import Fp8Config, Fp8Format, Fp8Recipe
from megatron.config.model import GluActivation, ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.errors import ConfigError
from megatron.model.experts.mixture import (
    DispatchPlan,
    Experts,
    GroupedLinear,
    MixtureOfExperts,
    RowGroups,
    build_feed_forward,
    check_sharing_out,
    dispatch_plan,
    parts_of_experts,
)
from megatron.model.mlp import ACTIVATIONS, MLP
from megatron.model.transformer import Block
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.partition import Init, Partition, Within, is_sequence_parallel, partition_of
from megatron.mpu.topology import Topology
from megatron.optimizer.param_groups import is_decayed
from tests.support.examples import examples
from tests.support.models import roughen, second_of_two, tiny_build, tiny_config, tiny_model

SIGMOID = RouterScoreFunction.SIGMOID
# Float64 sums of some dozens of terms of size 1, in another order.
ROUNDING = 1e-12
EXPERTS: dict[str, Any] = {"num_experts": 4, "add_bias_linear": False, "moe_ffn_hidden_size": 12}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"swiglu": True},
    "plain": {},
    "one of its own share": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "all": {"moe_router_topk": 4, "glu_activation": GluActivation.GEGLU},
    "three, unscaled": {"moe_router_topk": 3, "moe_router_pre_softmax": True},
    "sigmoid": {"moe_router_score_function": SIGMOID, "moe_router_topk_scaling_factor": 2.5},
    "of one group of two": {
        "moe_router_score_function": SIGMOID,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
    },
    "one sigmoid": {"moe_router_topk": 1, "moe_router_score_function": SIGMOID},
    "shared": {"moe_shared_expert_intermediate_size": 20},
    "residual": {"mlp_type": MlpType.RESIDUAL, "ffn_hidden_size": 20},
    "with biases": {
        "moe_shared_expert_intermediate_size": 20,
        "add_bias_linear": True,
        "swiglu": True,
    },
    "shared, with a gate": {
        "moe_shared_expert_intermediate_size": 6,
        "moe_shared_expert_gate": True,
        "swiglu": True,
    },
}


def config_of(name: str) -> ModelConfig:
    return tiny_config(**(EXPERTS | CONFIGS[name]))


def layer_of(config: ModelConfig) -> MixtureOfExperts:
    build = tiny_build()
    layer = MixtureOfExperts(config, build)
    roughen(layer, build.ctx)
    return layer


def some_hidden(length: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(length, 3, 16, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_()


def one_by_one(layer: MixtureOfExperts, config: ModelConfig, hidden: Tensor) -> Tensor:
    """Each token by itself, expert by expert, as the papers write it."""
    fc1, fc2, rows = layer.experts.fc1, layer.experts.fc2, []

    def biases_of(expert: int) -> tuple[Tensor, ...]:
        return tuple(one.bias[expert] for one in (fc1, fc2) if one.bias is not None)

    for token in hidden.reshape(-1, hidden.shape[-1]):
        sigmoid = config.moe_router_score_function is SIGMOID
        scores = layer.router.weight @ token
        likely = torch.sigmoid(scores) if sigmoid else torch.softmax(scores, dim=0)
        best = likely.clone()
        if config.moe_router_num_groups is not None:
            first, second = best[:2], best[2:]
            (second if first.sum() > second.sum() else first).fill_(-1.0)
        taken = best.sort(descending=True).indices[: config.moe_router_topk]
        own = config.moe_router_pre_softmax or config.moe_router_topk == 1
        whole = (1 if own else likely[taken].sum()) / config.moe_router_topk_scaling_factor
        row = torch.zeros_like(token)
        for expert in taken:
            row = row + likely[expert] / whole * mlp(
                config, token, fc1.weight[expert], fc2.weight[expert], *biases_of(expert)
            )
        shared = layer.shared_expert
        if shared is not None:
            biases = tuple(fc.bias for fc in (shared.fc1, shared.fc2) if fc.bias is not None)
            output = mlp(config, token, shared.fc1.weight, shared.fc2.weight, *biases)
            if shared.gate_bias is not None:
                of_others, own = torch.softmax(shared.gate @ token + shared.gate_bias, dim=0)
                row, output = row * of_others, output * own
            elif shared.gate is not None:
                output = output * torch.sigmoid(shared.gate @ token)
            row = row + output
        rows.append(row)
    return torch.stack(rows).view(hidden.shape)


def mlp(config: ModelConfig, token: Tensor, fc1: Tensor, fc2: Tensor, *biases: Tensor) -> Tensor:
    first, last = biases or (0.0, 0.0)
    middle = fc1 @ token + first
    if config.glu is None:
        return fc2 @ ACTIVATIONS[config.activation](middle) + last
    gate, up = middle.chunk(2)
    return fc2 @ (ACTIVATIONS[config.activation](gate) * up) + last


@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients_are_those_of_a_loop(name: str) -> None:
    config = config_of(name)
    layer, hidden = layer_of(config), some_hidden()
    weights = [hidden, *layer.parameters()]
    upstream = torch.randn(hidden.shape, dtype=torch.float64)
    found, expected = layer(hidden), one_by_one(layer, config, hidden)
    torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)
    grads = torch.autograd.grad((found * upstream).sum(), weights)
    truths = torch.autograd.grad((expected * upstream).sum(), weights)
    for grad, truth in zip(grads, truths):
        torch.testing.assert_close(grad, truth, rtol=1e-9, atol=ROUNDING * 100)


def test_a_dropped_choice_adds_nothing() -> None:
    """Nor has it a gradient; those that are left stay as they are."""
    config = dataclasses.replace(config_of("mixtral"), moe_expert_capacity_factor=8.0)
    layer, hidden = layer_of(config), some_hidden()
    shares, chosen = layer.router(hidden)
    dropped = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(3)) < 0.3
    found = layer.experts(hidden, shares, chosen.masked_fill(dropped, 4))
    expected = layer.experts(hidden, shares.masked_fill(dropped, 0.0), chosen)
    torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)
    weights = [hidden, *layer.router.parameters(), *layer.experts.parameters()]
    grads = torch.autograd.grad(found.square().sum(), weights, retain_graph=True)
    truths = torch.autograd.grad(expected.square().sum(), weights)
    for grad, truth in zip(grads, truths):
        torch.testing.assert_close(grad, truth, rtol=1e-9, atol=ROUNDING * 100)


def test_an_expert_that_no_token_takes_has_a_gradient_of_zero() -> None:
    layer, hidden = layer_of(config_of("mixtral")), some_hidden()
    with torch.no_grad():
        layer.router.weight[1:] *= 1e-3
        layer.router.weight[0] = 0
        hidden.abs_()
        layer.router.weight[3] = -1
    layer(hidden).sum().backward()
    gradient = layer.experts.fc1.weight.grad
    assert gradient is not None
    assert not gradient[3].any()
    assert gradient[1].any()


def test_a_token_does_not_see_what_stands_beside_it() -> None:
    layer, hidden = layer_of(config_of("mixtral")), some_hidden()
    together = layer(hidden)
    for at in range(hidden.shape[0]):
        alone = layer(hidden[at : at + 1])
        torch.testing.assert_close(alone, together[at : at + 1], rtol=ROUNDING, atol=ROUNDING)


def test_the_same_twice_is_the_same_bits() -> None:
    layer, hidden = layer_of(config_of("three, unscaled")), some_hidden()
    results = []
    for _ in range(2):
        output = layer(hidden)
        results.append([output, *torch.autograd.grad(output.sum(), [hidden, *layer.parameters()])])
    assert all(torch.equal(one, other) for one, other in zip(*results))


def test_equal_experts_are_a_dense_mlp() -> None:
    """Shares that sum to 1 of the same thing; Mixtral was begun from a dense model so."""
    layer = layer_of(config_of("mixtral"))
    dense = MLP(tiny_config(swiglu=True, ffn_hidden_size=12, add_bias_linear=False), tiny_build())
    roughen(dense, tiny_build().ctx)
    with torch.no_grad():
        layer.experts.fc1.weight.copy_(dense.fc1.weight.expand(4, -1, -1))
        layer.experts.fc2.weight.copy_(dense.fc2.weight.expand(4, -1, -1))
    hidden = some_hidden()
    torch.testing.assert_close(layer(hidden), dense(hidden), rtol=ROUNDING, atol=ROUNDING)


def test_groups_of_rows_have_matrices_of_their_own() -> None:
    build = tiny_build()
    layer = GroupedLinear((3, 2, 4), Partition("tp", dim=1), Init("normal", std=1.0), build)
    roughen(layer, build.ctx)
    rows = torch.randn(5, 4, dtype=torch.float64)
    found = layer(rows, RowGroups(torch.tensor([2, 0, 3])))
    torch.testing.assert_close(found[:2], F.linear(rows[:2], layer.weight[0]))
    torch.testing.assert_close(found[2:], F.linear(rows[2:], layer.weight[2]))
    assert repr(layer) == "GroupedLinear((3, 2, 4) in all, (3, 2, 4) here)"


@pytest.mark.parametrize("recipe", Fp8Recipe)
def test_in_fp8_every_matrix_is_a_linear_layer_in_fp8(recipe: Fp8Recipe) -> None:
    """Also of a group without rows, and of one with fewer than share a scale."""
    config = Fp8Config(fp8_format=Fp8Format.E4M3, fp8_recipe=recipe)
    build = dataclasses.replace(tiny_build(), fp8=config)
    layer = GroupedLinear((3, 128, 256), Partition("tp", dim=1), Init("normal", std=1.0), build)
    roughen(layer, build.ctx)
    draw, counts = torch.Generator().manual_seed(1), (17, 0, 3)
    rows = torch.randn(20, 256, generator=draw, dtype=torch.float64).requires_grad_()
    grad = torch.randn(20, 128, generator=draw, dtype=torch.float64)
    output = layer(rows, RowGroups(torch.tensor(counts)))
    output.backward(grad)
    assert layer.fp8 is not None
    assert (layer.fp8.counts, layer.fp8.matrices) == ((3, 3, 3), 3)
    found = (output.detach(), rows.grad, layer.weight.grad)
    parts = zip(rows.detach().split(counts), grad.split(counts), layer.weight.detach())
    expected = []
    for hidden, of_output, weight in parts:
        alone = ColumnParallelLinear(
            256, 128, ctx=build.ctx, init=Init("zeros"), bias=False, dtype=torch.float64
        )
        alone.weight.data.copy_(weight)
        if hidden.numel():
            alone.in_fp8(config)
        of_group = hidden.clone().requires_grad_()
        product = alone(of_group)
        product.backward(of_output)
        expected.append((product.detach(), of_group.grad, alone.weight.grad))
    outputs, of_rows, of_weights = zip(*expected)
    assert torch.equal(found[0], torch.cat(outputs))
    assert torch.equal(found[1], torch.cat(of_rows))
    assert torch.equal(found[2], torch.stack(of_weights))
    assert not found[2][1].any()


def test_every_tensor_parallel_rank_has_a_part_of_every_expert() -> None:
    config = config_of("shared, with a gate")
    layer = MixtureOfExperts(config, tiny_build(second_of_two(), sequence_parallel=True))
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {
        "router.weight": (4, 16),
        "experts.fc1.weight": (4, 12, 16),
        "experts.fc2.weight": (4, 16, 6),
        "shared_expert.gate": (1, 16),
        "shared_expert.fc1.weight": (6, 16),
        "shared_expert.fc2.weight": (16, 3),
    }
    assert layer.shared_expert is not None
    assert layer.shared_expert.gate is not None
    assert is_sequence_parallel(layer.shared_expert.gate)
    assert partition_of(layer.router.weight) is None
    assert is_sequence_parallel(layer.router.weight)
    assert partition_of(layer.experts.fc1.weight) == Partition("tp", dim=1, blocks=2)
    assert partition_of(layer.experts.fc2.weight) == Partition("tp", dim=2)
    assert not is_sequence_parallel(layer.experts.fc1.weight)
    odd = tiny_config(**(EXPERTS | {"moe_ffn_hidden_size": 7}))
    with pytest.raises(ConfigError, match="does not divide evenly"):
        Experts(odd, tiny_build(second_of_two()))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
@examples(40)
def test_a_choice_goes_to_all_parts_of_its_expert(ep: int, etp: int, own: int, seed: int) -> None:
    experts = ep * own
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, experts + 1, (5, 2), generator=generator)
    found = parts_of_experts(chosen, experts, ep=ep, etp=etp)
    for choice, parts in zip(chosen.flatten().tolist(), found.view(-1, etp).tolist()):
        if choice == experts:  # dropped
            assert parts == [experts * etp] * etp
            continue
        ranks = [part // own for part in parts]
        assert ranks == [choice // own * etp + t for t in range(etp)], "of etp, which is faster"
        assert {part % own for part in parts} == {choice % own}


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 10**6))
@examples(60)
def test_every_row_meets_its_expert_and_comes_back(ranks: int, own: int, seed: int) -> None:
    """All ranks are played by this process, with messages as `all_to_all_rows` sends them."""
    torch.manual_seed(seed)
    counts = torch.randint(0, 4, (ranks, own * ranks))
    plans = [dispatch_plan(counts, rank, torch.device("cpu")) for rank in range(ranks)]
    # A row knows its source, its expert and its number there.
    rows = [
        torch.tensor([(r, e, n) for e in range(own * ranks) for n in range(counts[r, e])]).view(
            -1, 3
        )
        for r in range(ranks)
    ]

    def exchanged(held: list[Tensor], plans: list[DispatchPlan]) -> list[Tensor]:
        parts = [torch.split(one, list(plan.sends)) for one, plan in zip(held, plans)]
        arrived = [torch.cat([part[to] for part in parts]) for to in range(ranks)]
        assert [len(one) for one in arrived] == [sum(plan.receives) for plan in plans]
        return arrived

    assert all(plan.order is not None for plan in plans)
    here = [one[plan.order] for one, plan in zip(exchanged(rows, plans), plans)]
    for rank, (one, plan) in enumerate(zip(here, plans)):
        for at, group in enumerate(torch.split(one, plan.groups.sizes)):
            assert (group[:, 1] == rank * own + at).all(), "sorted by expert"
            order = [tuple(row) for row in group.tolist()]
            assert order == sorted(order), "and then by source, in the order of the source"
    sent_back = [one[plan.back] for one, plan in zip(here, plans)]
    back = exchanged(
        sent_back, [plan._replace(sends=plan.receives, receives=plan.sends) for plan in plans]
    )
    for one, other in zip(back, rows):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2), (2, 2)])
def test_shared_out_experts_are_fewer_or_in_parts(ep: int, etp: int) -> None:
    config = config_of("mixtral")
    ranks = Group(tuple(range(ep * etp)), 1)
    grid = Topology(dp=ep * etp, ep=ep, etp=etp)
    ctx = dataclasses.replace(ParallelContext.single(), topology=grid, etp_ep=ranks)
    build = dataclasses.replace(tiny_build(), ctx=ctx)
    layer, alone = MixtureOfExperts(config, build), MixtureOfExperts(config, tiny_build())
    cuts = (Within(1, etp, blocks=2), Within(2, etp))
    for here, whole, within in zip(layer.experts.parameters(), alone.experts.parameters(), cuts):
        assert partition_of(here) == Partition("etp_ep", dim=0, within=within)
        shape = [*whole.shape]
        shape[0] //= ep
        shape[within.dim] //= etp
        assert [*here.shape] == shape
    assert layer.router.weight.shape == alone.router.weight.shape


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (Topology(dp=3, ep=3), "cannot be shared out evenly"),
        (Topology(tp=2, ep=2, etp=1), "would send the same tokens"),
        (Topology(tp=2, etp=1), "would send the same tokens"),
        (Topology(dp=7, etp=7), "matrices of an expert cannot be shared out evenly"),
    ],
)
def test_experts_that_cannot_be_shared_out_are_refused(grid: Topology, words: str) -> None:
    config = tiny_config(num_experts=4, add_bias_linear=False, swiglu=True)
    with pytest.raises(ConfigError, match=words):
        check_sharing_out(config, grid, splits_tokens=False)


def test_all_of_its_matrices_are_decayed() -> None:
    layer = layer_of(config_of("shared, with a gate"))
    assert all(is_decayed(name, parameter) for name, parameter in layer.named_parameters())


def test_shares_are_computed_in_fp32_in_half_precision() -> None:
    build = tiny_build(precision=PrecisionConfig(bf16=True))
    layer = MixtureOfExperts(config_of("shared, with a gate"), build)
    roughen(layer, build.ctx)
    hidden = some_hidden().to(torch.bfloat16)
    shares, _ = layer.router(hidden)
    assert shares.dtype == torch.float32
    assert layer(hidden).dtype == torch.bfloat16


def test_a_block_has_what_the_config_asks_for() -> None:
    build = tiny_build()
    assert isinstance(build_feed_forward(tiny_config(), build, layer=0), MLP)
    assert isinstance(build_feed_forward(tiny_config(num_experts=1), build, layer=1), MLP)
    assert isinstance(build_feed_forward(config_of("plain"), build, layer=1), MixtureOfExperts)
    some = dataclasses.replace(config_of("mixtral"), num_layers=4, moe_layer_freq="[1,0,1,1]")
    blocks = [m for m in tiny_model(some).modules() if isinstance(m, Block)]
    has_experts = [isinstance(block.mlp, MixtureOfExperts) for block in blocks]
    assert has_experts == [True, False, True, True]
