"""What a router chooses, and the gradients of its own losses against the formulas."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.config.experts import LoadBalancing, RouterScoreFunction
from megatron.config.precision import PrecisionConfig
from megatron.errors import MegatronError
from megatron.model.experts.router import Groups, Router, best_experts, counts_of
from megatron.model.specs import ModelBuild
from tests.support.examples import examples
from tests.support.experts import balance_by_the_paper
from tests.support.models import roughen, tiny_build, tiny_config, tiny_model, tiny_tokens

ROUNDING = 1e-12
LENGTH, BATCH = 6, 3
SEQ_AUX_LOSS = LoadBalancing.SEQ_AUX_LOSS
BALANCED = {"moe_router_load_balancing_type": SEQ_AUX_LOSS, "moe_aux_loss_coeff": 0.25}


def router_of(build: ModelBuild | None = None, **flags: Any) -> Router:
    build = build or tiny_build()
    router = Router(tiny_config(**{"num_experts": 5, "add_bias_linear": False, **flags}), build)
    roughen(router, build.ctx)
    return router


def some_hidden() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(LENGTH, BATCH, 16, generator=generator, dtype=torch.float64)


def test_shares_of_the_best_are_their_probabilities_scaled_or_not() -> None:
    router, hidden = router_of(moe_router_topk=3), some_hidden()
    likely = torch.softmax(hidden @ router.weight.t(), dim=-1)
    best, expected = likely.sort(dim=-1, descending=True)
    shares, chosen = router(hidden)
    assert torch.equal(chosen, expected[..., :3])
    top = best[..., :3]
    torch.testing.assert_close(shares, top / top.sum(-1, keepdim=True), rtol=ROUNDING, atol=0)
    unscaled, same = router_of(moe_router_topk=3, moe_router_pre_softmax=True)(hidden)
    assert torch.equal(same, chosen)
    torch.testing.assert_close(unscaled, top, rtol=ROUNDING, atol=0)


def test_a_bias_is_part_of_the_scores() -> None:
    router, hidden = router_of(moe_router_topk=3, moe_router_add_bias=True), some_hidden()
    assert router.bias is not None
    assert float(router.bias.detach().abs().min()) > 0
    likely = torch.softmax(hidden @ router.weight.t() + router.bias, dim=-1)
    best, expected = likely.sort(dim=-1, descending=True)
    shares, chosen = router(hidden)
    assert torch.equal(chosen, expected[..., :3])
    top = best[..., :3]
    torch.testing.assert_close(shares, top / top.sum(-1, keepdim=True), rtol=ROUNDING, atol=0)


def test_sigmoids_far_below_zero_still_give_shares() -> None:
    """Their sum is 0 in fp32, and dividing by it would give numbers that are not finite."""
    build = tiny_build(precision=PrecisionConfig())
    router = router_of(build, moe_router_score_function=RouterScoreFunction.SIGMOID)
    with torch.no_grad():
        router.weight.copy_(-torch.arange(1.0, 6.0)[:, None].expand(5, 16) - 150)
    shares, chosen = router(torch.ones(1, 1, 16))
    assert chosen.tolist() == [[[0, 1]]]
    # Scores differ by 16, so that all but e^-16 belongs to the first.
    torch.testing.assert_close(shares[0, 0, 0], torch.tensor(1.0), rtol=1e-6, atol=0)


@examples(60)
@given(
    groups=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (3, 3), (6, 2)]),
    each=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_experts_are_the_best_of_the_best_groups(
    groups: tuple[int, int], each: int, seed: int
) -> None:
    number, chosen = groups
    size, taken = 12 // number, each * chosen
    affinity = torch.rand(4, 12, generator=torch.Generator().manual_seed(seed))
    found = best_experts(affinity, taken, Groups(number, chosen))
    for token, experts in zip(affinity.tolist(), found.tolist()):
        members = [range(group * size, (group + 1) * size) for group in range(number)]
        scores = [sum(sorted((token[e] for e in of), reverse=True)[:each]) for of in members]
        best = sorted(range(number), key=lambda group: -scores[group])[:chosen]
        allowed = [expert for group in best for expert in members[group]]
        assert experts == sorted(allowed, key=lambda expert: -token[expert])[:taken]


def test_the_balance_has_shares_of_sigmoids_where_the_router_has() -> None:
    build, hidden = tiny_build(), some_hidden()
    flags = {"moe_router_score_function": RouterScoreFunction.SIGMOID}
    router = router_of(build, **BALANCED, **flags)
    build.router_loss.value = 1.0
    _, chosen = router(hidden)
    likely = torch.sigmoid(hidden @ router.weight.t())
    router(hidden)[0].sum().backward()
    found = build.router_loss.taken()
    # By eq. 19 affinities are divided by their sum; a softmax over their logs does the same.
    expected = balance_by_the_paper(likely.log(), chosen)
    torch.testing.assert_close(found, expected.detach(), rtol=ROUNDING, atol=0)


def test_a_bias_has_a_say_in_the_choice_and_none_in_the_shares() -> None:
    flags = {"moe_router_score_function": RouterScoreFunction.SIGMOID}
    plain, hidden = router_of(**flags), some_hidden()
    router = router_of(**flags, moe_router_enable_expert_bias=True)
    assert router.expert_bias is not None
    with torch.no_grad():
        router.weight.copy_(plain.weight)
        router.expert_bias.copy_(torch.tensor([0.0, 0.0, 5.0, 0.0, -5.0]))
    shares, chosen = router(hidden)
    assert bool((chosen[..., 0] == 2).all())
    assert not bool((chosen == 4).any())
    likely = torch.sigmoid(hidden @ router.weight.t()).gather(-1, chosen)
    expected = likely / likely.sum(-1, keepdim=True)
    torch.testing.assert_close(shares, expected, rtol=ROUNDING, atol=0)
    with torch.no_grad():
        router.expert_bias.zero_()
    assert all(map(torch.equal, router(hidden), plain(hidden)))


@pytest.mark.parametrize("flags", [{"moe_router_num_groups": 5, "moe_router_group_topk": 2}, {}])
def test_the_balance_is_of_the_best_experts_of_all(flags: dict[str, int]) -> None:
    """Whatever groups and biases make of the choice (arXiv 2412.19437, eq. 18)."""
    build, hidden = tiny_build(), some_hidden()
    sigmoid = {"moe_router_score_function": RouterScoreFunction.SIGMOID}
    router = router_of(build, **BALANCED, **sigmoid, **flags, moe_router_enable_expert_bias=True)
    assert router.expert_bias is not None
    with torch.no_grad():
        router.expert_bias.copy_(torch.tensor([0.0, 0.0, 5.0, 0.0, -5.0]))
    build.router_loss.value = 1.0
    router(hidden)[0].sum().backward()
    likely = torch.sigmoid(hidden @ router.weight.t())
    expected = balance_by_the_paper(likely.log(), likely.topk(2, dim=-1).indices)
    found = build.router_loss.taken()
    torch.testing.assert_close(found, expected.detach(), rtol=ROUNDING, atol=0)


def test_tokens_are_counted_where_there_is_a_backward_pass() -> None:
    router, hidden = router_of(), some_hidden()
    with torch.no_grad():
        router(hidden)
    assert not router.taken_load().any()
    shares, chosen = router(hidden)
    assert not router.taken_load().any()
    shares.sum().backward()
    assert router.taken_load().tolist() == torch.bincount(chosen.flatten(), minlength=6).tolist()


def test_what_is_beyond_the_capacity_is_dropped_and_counted_beside_the_loads() -> None:
    """Six tokens that are alike take the same two of five experts, at most three each."""
    flags = {"moe_expert_capacity_factor": 1.0, "moe_eval_capacity_factor": 2.0}
    router, alike = router_of(**flags), some_hidden()[:1].expand(LENGTH, BATCH, 16)
    shares, taken = router(alike)
    assert torch.equal(taken[:3], router_of()(alike)[1][:3])
    assert taken[3:].eq(5).all()
    shares.sum().backward()
    *loads, dropped = router.taken_load().tolist()
    assert (sum(loads), dropped) == (LENGTH * BATCH * 2, 3 * BATCH * 2)
    assert router.eval()(alike)[1][:5].lt(5).all()
    assert router(alike)[1][5:].eq(5).all()


def test_counts_are_of_each_sequence() -> None:
    chosen = torch.tensor([[[0, 1], [2, 1]], [[0, 2], [1, 2]]])  # [s 2, b 2, k 2]
    assert counts_of(chosen, 4).tolist() == [[2, 1, 1, 0], [0, 2, 2, 0]]


@pytest.mark.parametrize("flags", [BALANCED, {"moe_z_loss_coeff": 0.5}])
def test_gradients_are_those_of_the_loss_beside_the_task(flags: dict[str, float]) -> None:
    build, scale = tiny_build(), 0.75
    router, hidden = router_of(build, **flags), some_hidden().requires_grad_()
    build.router_loss.value = scale
    weights = [hidden, router.weight]
    upstream = torch.randn(LENGTH, BATCH, 2, dtype=torch.float64)
    shares, chosen = router(hidden)
    found = torch.autograd.grad((shares * upstream).sum(), weights)
    scores = hidden @ router.weight.t()
    loss = 0.25 * balance_by_the_paper(scores, chosen)
    if flags is not BALANCED:
        loss = 0.5 * torch.logsumexp(scores, dim=-1).square().mean(dim=0).sum()
    plain = torch.softmax(scores.gather(-1, chosen), dim=-1)
    expected = torch.autograd.grad((plain * upstream).sum() + scale * loss, weights)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=ROUNDING)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_balance_is_noted_once_for_each_layer(recompute: bool) -> None:
    build = tiny_build(recompute=recompute)
    model = tiny_model(tiny_config(num_experts=3, add_bias_linear=False, **BALANCED), build)
    build.router_loss.value = 1.0
    loss = model(tiny_tokens(batch=2), labels=tiny_tokens(batch=2))
    assert build.router_loss.taken() is None
    loss.total.backward()
    noted = build.router_loss.taken()
    assert noted is not None
    assert 0.9 * 4 < float(noted) < 1.5 * 4  # two layers and two sequences, without the weight
    assert not noted.requires_grad
    assert build.router_loss.taken() is None


def test_outside_of_training_there_is_no_loss() -> None:
    router, hidden = router_of(**BALANCED), some_hidden()
    plain, _ = router_of()(hidden)
    assert torch.equal(router(hidden)[0], plain)  # and it is no part of what goes on
    router.eval()
    router(hidden)[0].sum().backward()  # with no scale set


def test_an_engine_that_does_not_say_what_it_counts_is_an_error() -> None:
    model = tiny_model(tiny_config(num_experts=3, add_bias_linear=False, **BALANCED))
    loss = model(tiny_tokens(), labels=tiny_tokens())
    with pytest.raises(MegatronError, match="the weight of a router's loss was not set"):
        loss.total.backward()


def test_tokens_are_assigned_together_in_training_alone() -> None:
    flags = {"moe_router_load_balancing_type": LoadBalancing.SINKHORN}
    router, plain, hidden = router_of(**flags), router_of(), some_hidden()
    for one in (router, plain):
        with torch.no_grad():
            one.weight[0] += hidden.mean(dim=(0, 1))  # the first expert is the best for most
    together, alone = router(hidden)[1], plain(hidden)[1]
    assert together.eq(0).sum() < alone.eq(0).sum()
    assert torch.equal(router.eval()(hidden)[1], alone)


def test_it_is_said_what_a_router_is() -> None:
    assert repr(router_of()) == "Router(16, 5, taken=2)"
