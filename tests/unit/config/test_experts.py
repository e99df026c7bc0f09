"""Flags about experts: what makes no sense, what would depend on micro-batches, what is dense."""

import dataclasses
from typing import Any

import pytest

from megatron.config.experts import LoadBalancing, MlpType, RouterScoreFunction, expert_problems
from megatron.config.model import ModelConfig
from megatron.errors import ConfigError
from tests.unit.config.groups import a_model

EXPERTS: dict[str, Any] = {"num_experts": 4, "add_bias_linear": False}
SINKHORN = {"moe_router_load_balancing_type": LoadBalancing.SINKHORN}
SEQ_AUX_LOSS = LoadBalancing.SEQ_AUX_LOSS
SIGMOID = RouterScoreFunction.SIGMOID
BALANCED = {
    "moe_router_load_balancing_type": SEQ_AUX_LOSS,
    "moe_aux_loss_coeff": 0.01,
}


def model(**changes: Any) -> ModelConfig:
    return a_model(**{**EXPERTS, **changes})


@pytest.mark.parametrize(
    ("flags", "problem", "found"),
    [
        ({"moe_router_topk": 5}, "as many experts as it should", "--moe-router-topk 5, --num-exp"),
        ({"moe_router_topk": 0}, "as many experts as it should", "--moe-router-topk 0, --num-exp"),
        ({"moe_router_topk": 1}, "the router would learn nothing", "without --moe-router-pre-soft"),
        (
            {"moe_router_score_function": SIGMOID, "moe_router_pre_softmax": True},
            "either sigmoids of scores or a softmax",
            "sigmoid with --moe-router-pre-softmax",
        ),
        *(
            ({"moe_router_topk_scaling_factor": f}, "not a positive number", f"scaling-factor {f}")
            for f in (0.0, -1.0, float("inf"), float("nan"))
        ),
        (
            {"moe_router_enable_expert_bias": True},
            "added to sigmoids of scores alone",
            "without --moe-router-score-function sigmoid",
        ),
        *(
            ({"moe_router_bias_update_rate": rate}, "not a positive number", f"update-rate {rate}")
            for rate in (0.0, -1.0, float("inf"), float("nan"))
        ),
        *(
            ({"moe_expert_capacity_factor": f}, "not a positive number", f"capacity-factor {f}")
            for f in (0.0, -1.0, float("inf"), float("nan"))
        ),
        (
            {"moe_eval_capacity_factor": 1.0},
            "dropped in evaluations alone",
            "--moe-eval-capacity-factor 1.0 without --moe-expert-capacity-factor",
        ),
        *(
            (
                {"mlp_type": MlpType.RESIDUAL, **flags},
                "one MLP beside its experts",
                "--mlp-type res",
            )
            for flags in (
                {"moe_shared_expert_intermediate_size": 8},
                {"moe_shared_expert_gate": True, "moe_shared_expert_intermediate_size": 8},
            )
        ),
        ({"moe_min_capacity": 0}, "at least one token", "--moe-min-capacity 0"),
        ({"moe_router_num_groups": 2}, "by half", "num-groups 2, --moe-router-group-topk None"),
        ({"moe_router_group_topk": 2}, "by half", "num-groups None, --moe-router-group-topk 2"),
        *(
            (
                {"moe_router_num_groups": groups, "moe_router_group_topk": chosen} | more,
                problem,
                f"--moe-router-num-groups {groups}, --moe-router-group-topk {chosen}",
            )
            for groups, chosen, more, problem in (
                (3, 1, {}, "do not divide into equal groups"),
                (0, 1, {}, "do not divide into equal groups"),
                (2, 3, {}, "as many groups of experts as it should"),
                (2, 0, {}, "as many groups of experts as it should"),
                (2, 2, {"moe_router_topk": 3}, "equally many experts of each group"),
                (4, 1, {}, "equally many experts of each group"),
            )
        ),
        ({"moe_ffn_hidden_size": 0}, "a size is not positive", "--moe-ffn-hidden-size 0"),
        ({"num_experts": 0}, "a size is not positive", "--num-experts 0"),
        (
            {"moe_shared_expert_intermediate_size": 0},
            "a size is not positive",
            "--moe-shared-expert-intermediate-size 0",
        ),
        ({"expert_interval": 0}, "a size is not positive", "--expert-interval 0"),
        (
            {"expert_interval": 2, "moe_layer_freq": "2"},
            "named twice",
            "--moe-layer-freq 2, --expert-interval 2",
        ),
        ({"expert_interval": 3}, "no layer has them", "--expert-interval 3, --num-layers 2"),
        ({"moe_layer_freq": "[0]*2"}, "no layer has them", "--num-experts 4, --moe-layer-freq [0]"),
        ({"moe_layer_freq": "[0]+[1]*2"}, "not of as many layers", "--num-layers 2"),
        (
            {"moe_shared_expert_gate": True},
            "no shared expert whose output",
            "without --moe-shared-expert-intermediate-size",
        ),
        ({"moe_z_loss_coeff": -1.0}, "is not a number from 0", "--moe-z-loss-coeff -1.0"),
        (
            {**BALANCED, "moe_aux_loss_coeff": float("nan")},
            "is not a number from 0",
            "--moe-aux-loss-coeff nan",
        ),
        ({"moe_aux_loss_coeff": 0.1}, "asked for by half", "type none, --moe-aux-loss-coeff 0.1"),
        (
            {"moe_router_load_balancing_type": SEQ_AUX_LOSS},
            "asked for by half",
            "type seq_aux_loss, --moe-aux-loss-coeff 0.0",
        ),
        ({**SINKHORN, "moe_aux_loss_coeff": 0.1}, "no loss balances", "type sinkhorn, --moe-aux"),
        *(
            ({**SINKHORN, **flags}, "assigned together", f"type sinkhorn, --moe-{name}")
            for name, flags in (
                ("router-num-groups", {"moe_router_num_groups": 2, "moe_router_group_topk": 1}),
                (
                    "router-enable-expert-bias",
                    {"moe_router_enable_expert_bias": True, "moe_router_score_function": SIGMOID},
                ),
                ("expert-capacity-factor", {"moe_expert_capacity_factor": 1.0}),
            )
        ),
    ],
)
def test_what_makes_no_sense_is_refused(flags: dict[str, Any], problem: str, found: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        model(**flags)
    assert found in str(caught.value)


def test_what_makes_sense_is_not() -> None:
    assert model().has_experts
    assert model(moe_router_topk=1, moe_router_pre_softmax=True).has_experts
    assert model(moe_router_topk=1, moe_router_score_function=SIGMOID).has_experts
    assert model(add_qkv_bias=True).has_qkv_bias_alone
    assert model(**BALANCED).has_router_loss
    assert model(moe_z_loss_coeff=0.1).has_router_loss
    assert not model().has_router_loss
    assert model().moe_router_load_balancing_type is LoadBalancing.NONE


@pytest.mark.parametrize("experts", [None, 1])
def test_in_a_dense_model_the_other_flags_mean_nothing(experts: int | None) -> None:
    """Scripts of Microsoft's fork give them with --num-experts 1."""
    flags = {"num_experts": experts, "moe_router_topk": 7, "moe_aux_loss_coeff": 0.01}
    dense = a_model(**flags)
    assert not dense.has_experts
    assert not dense.has_router_loss
    assert list(expert_problems(dense)) == []
    assert dense.meaning() == a_model().meaning()
    assert a_model().fields_that_differ(dense) == []


def test_what_makes_another_network_is_named() -> None:
    one = model(ffn_hidden_size=48)
    assert one.expert_width == one.ffn_width == 48
    assert one.fields_that_differ(model(moe_ffn_hidden_size=48, ffn_hidden_size=8)) == []
    assert one.fields_that_differ(model(ffn_hidden_size=40)) == ["ffn_hidden_size"]
    narrow = model(ffn_hidden_size=48, moe_ffn_hidden_size=40)
    assert one.fields_that_differ(narrow) == ["moe_ffn_hidden_size"]
    assert one.fields_that_differ(model(ffn_hidden_size=48, num_experts=5)) == ["num_experts"]
    sigmoid = model(ffn_hidden_size=48, moe_router_score_function=SIGMOID)
    assert one.fields_that_differ(sigmoid) == ["moe_router_score_function"]
    scaled = model(ffn_hidden_size=48, moe_router_topk_scaling_factor=2.5)
    assert one.fields_that_differ(scaled) == ["moe_router_topk_scaling_factor"]
    groups = model(ffn_hidden_size=48, moe_router_num_groups=2, moe_router_group_topk=1)
    assert one.fields_that_differ(groups) == ["moe_router_group_topk", "moe_router_num_groups"]
    biased = {"moe_router_score_function": SIGMOID, "moe_router_enable_expert_bias": True}
    found = sigmoid.fields_that_differ(model(ffn_hidden_size=48, **biased))
    assert found == ["moe_router_enable_expert_bias"]
    shared = model(ffn_hidden_size=48, moe_shared_expert_intermediate_size=8)
    assert one.fields_that_differ(shared) == ["moe_shared_expert_intermediate_size"]
    assert one.fields_that_differ(model(ffn_hidden_size=48, expert_interval=1)) == []
    second = model(ffn_hidden_size=48, expert_interval=2)
    assert second.expert_layers == (False, True)
    assert one.fields_that_differ(second) == ["expert_interval"]
    listed = model(ffn_hidden_size=48, moe_layer_freq="[0,1]")
    assert second.fields_that_differ(listed) == []
    # Of which the dense layer has the width of an MLP.
    wider = model(ffn_hidden_size=56, moe_ffn_hidden_size=48, moe_layer_freq="[0, 1]")
    assert listed.fields_that_differ(wider) == ["ffn_hidden_size", "moe_ffn_hidden_size"]
    gated = dataclasses.replace(shared, moe_shared_expert_gate=True)
    assert shared.fields_that_differ(gated) == ["moe_shared_expert_gate"]
    # What is added to the loss is of the training alone.
    assert one.fields_that_differ(model(ffn_hidden_size=48, **BALANCED)) == []
    slow = model(ffn_hidden_size=48, moe_router_bias_update_rate=1e-4)
    assert one.fields_that_differ(slow) == []
    assert "num_experts" in a_model().fields_that_differ(model())
