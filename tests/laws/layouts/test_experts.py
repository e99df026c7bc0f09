"""The laws of layouts, of resharding and of engines, for a model whose layers have experts.

A router has losses of its own here, of which each counts sequences, while the loss of the task
counts tokens that are not masked. What a token takes is a choice, and a wrong gradient of a share
is still a gradient: so each sum over ranks is left out once, to see that the law sees it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.formats.native.source import write_sharded
from megatron.checkpoint.formats.registry import open_source
from megatron.checkpoint.upcycle import UpcycledSource
from megatron.config.experts import LoadBalancing, MlpType, RouterScoreFunction, TokenDropPolicy
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.engine.native import NativeEngine
from megatron.model.experts import mixture as moe
from megatron.model.experts import router as moe_router
from megatron.model.init import draw, weight_init
from megatron.model.specs import RouterLoss
from megatron.mpu.context import ReplicaGroups
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP32,
    FP64,
    MODELS,
    Record,
    assert_all_close,
    assert_close,
    tiny_run,
    train_all,
    whole,
    write_tiny_corpus,
)

EXPERTS: dict[str, Any] = {
    **MODELS["mixtral"],
    "moe_shared_expert_intermediate_size": 8,
    "moe_shared_expert_gate": True,
    "weight_decay": 0.1,
}
# Far from what a run would have, so that their gradients are a good part of the whole.
LOSSES = {
    "moe_router_load_balancing_type": LoadBalancing.SEQ_AUX_LOSS,
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.02,
    "eod_mask_loss": True,
}
OTHERS: dict[str, dict[str, Any]] = {
    "one expert of its own share": {
        "swiglu": False,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "use_parallel_residual": True,
        "num_experts": 3,
    },
    "residual, biases": {
        "mlp_type": MlpType.RESIDUAL,
        "moe_shared_expert_intermediate_size": None,
        "moe_shared_expert_gate": False,
        "add_bias_linear": True,
        "moe_expert_capacity_factor": 1.0,
        # Zero biases move in the first steps only where the steps are of equal length.
        "optimizer": "sgd",
        "lr": 0.05,
    },
    "most experts, sigmoid, xavier, sgd": {
        "glu_activation": "geglu",
        "swiglu": False,
        "moe_router_topk": 5,
        "num_experts": 6,
        "moe_router_num_groups": 6,
        "moe_router_group_topk": 5,
        "moe_router_score_function": RouterScoreFunction.SIGMOID,
        "moe_router_topk_scaling_factor": 2.5,
        "init_method_xavier_uniform": True,
        "optimizer": "sgd",
        "lr": 0.05,
    },
}
UNBALANCED = {
    "moe_router_load_balancing_type": LoadBalancing.NONE,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": 0.0,
}
TP2 = {"tensor_model_parallel_size": 2, "micro_batch_size": 4}
PP2 = {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}
SP = {"sequence_parallel": True}
SHARED_OUT = {"expert_model_parallel_size": 2, "micro_batch_size": 2}
# World size to layouts, each with a part of training that has its own way of a backward pass.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "recomputed": {"recompute_granularity": "full", "micro_batch_size": 4},
        "in one piece, offloaded": {"micro_batch_size": 8, "cpu_offloading_num_layers": 1},
    },
    2: {
        "tp": {**TP2, "recompute_granularity": "selective", "recompute_modules": ("mlp",)},
        "tp, split sequences": {
            **TP2,
            **SP,
            "recompute_granularity": "selective",
            "recompute_modules": ("layernorm", "core_attn"),
        },
        "tp, saved in parts": {
            **TP2,
            "recompute_granularity": "full",
            "distribute_saved_activations": True,
        },
        "pp, zero bubble, a stage without experts": {
            **PP2,
            "pipeline_schedule": "zero-bubble",
            "moe_layer_freq": "[0,1]",
        },
        "pp, interleaved": {
            **PP2,
            "num_layers": 4,
            "moe_layer_freq": "[0]*1+[1]*2+[0]",
            "pipeline_schedule": "interleaved",
            "num_virtual_stages_per_pipeline_rank": 2,
        },
        "dp, shared state": {
            "micro_batch_size": 2,
            "use_distributed_optimizer": True,
            "overlap_param_gather": True,
            "overlap_grad_reduce": True,
            "ddp_bucket_size": 1000,
        },
        "shared out, a dense layer": {**SHARED_OUT, "moe_layer_freq": "2"},
        "shared out, beside the shared one": {**SHARED_OUT, "moe_shared_expert_overlap": True},
        "shared out over tp": {
            **TP2,
            **SP,
            "moe_shared_expert_overlap": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "recompute_granularity": "full",
        },
    },
    4: {
        "tp 4, split sequences": {"tensor_model_parallel_size": 4, **SP, "micro_batch_size": 4},
        "tp, pp": {**TP2, **PP2, **SP, "recompute_granularity": "full"},
        "tp, dp": {**TP2, **SP, "use_distributed_optimizer": True, "micro_batch_size": 2},
        "pp, dp": {**PP2, "pipeline_schedule": "1f1b"},
        "shared out twice, shared state": {
            **SHARED_OUT,
            "use_distributed_optimizer": True,
            "overlap_param_gather": True,
            "overlap_grad_reduce": True,
            "ddp_bucket_size": 1000,
            "micro_batch_size": 1,
        },
        "shared out over tp, cp": {
            **TP2,
            **SP,
            "context_parallel_size": 2,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
        },
        "shared out in parts, over other ranks than tp": {
            **SHARED_OUT,
            "expert_tensor_parallel_size": 2,
            "use_distributed_optimizer": True,
            "ddp_bucket_size": 1000,
        },
        "shared out in parts over tp": {**TP2, **SP, "expert_model_parallel_size": 2},
        "whole where tp splits the rest": {
            **TP2,
            **SP,
            "expert_tensor_parallel_size": 1,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "micro_batch_size": 2,
        },
        "shared out, pp, a stage without experts": {
            **PP2,
            "moe_layer_freq": "[1,0]",
            "use_distributed_optimizer": True,
            "pipeline_schedule": "zero-bubble",
            "expert_model_parallel_size": 2,
            "use_tp_pp_dp_mapping": True,
        },
    },
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def run_of(corpus: str, **flags: Any) -> RunConfig:
    return tiny_run(corpus, **{**EXPERTS, "eval_iters": 1, "eval_interval": 3, **flags})


def train_alone(configs: Sequence[RunConfig]) -> list[Record]:
    (records,) = run_on_ranks(1, train_all, configs)
    return records


def balances(record: Record) -> list[float]:
    """Return the reported balance of experts; 1 where they are equally busy."""
    balance = [step.load_balancing_loss for step in record.steps]
    assert all(one is not None and one > 0.9 for one in balance), balance
    return [one or 0.0 for one in balance]


def check_equal(found: Sequence[Record], alone: Record) -> None:
    for record in found:  # every rank has the same numbers
        assert (record.losses, record.grad_norms) == (found[0].losses, found[0].grad_norms)
    assert_close(found[0].losses, alone.losses, FP64)
    assert_close(found[0].grad_norms, alone.grad_norms, FP64)
    assert_close(balances(found[0]), balances(alone), FP64)
    assert_close(
        [one.mean for one in found[0].evaluations], [one.mean for one in alone.evaluations], FP64
    )
    assert_all_close(whole(found, prefix="model/"), whole([alone], prefix="model/"), FP64)


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_layout_trains_the_same_experts(corpus: str, world_size: int) -> None:
    layouts = LAYOUTS[world_size]
    names = ("num_layers", "moe_layer_freq")
    shapes = [{n: flags[n] for n in names if n in flags} for flags in layouts.values()]
    distinct = {str(shape): run_of(corpus, **LOSSES, **shape) for shape in shapes}
    of_shape = dict(zip(distinct, train_alone([*distinct.values()])))
    alone = [of_shape[str(shape)] for shape in shapes]
    configs = [run_of(corpus, **LOSSES, **flags) for flags in layouts.values()]
    by_rank = run_on_ranks(world_size, train_all, configs, timeout_s=150)
    assert max(alone[0].grad_norms) > 0.5, "clipping is meant to be active"
    for at, (name, expected) in enumerate(zip(layouts, alone)):
        try:
            check_equal([records[at] for records in by_rank], expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_a_shared_expert_beside_the_exchange_changes_no_bit(corpus: str) -> None:
    layouts = [
        {**SHARED_OUT, **LOSSES, "moe_shared_expert_overlap": overlaps}
        for overlaps in (False, True)
    ]
    configs = [run_of(corpus, **layout) for layout in layouts]
    for one, other in run_on_ranks(2, train_all, configs):
        assert (one.losses, one.grad_norms) == (other.losses, other.grad_norms)


@pytest.mark.parametrize("other", OTHERS)
def test_other_ways_of_choosing_are_split_as_well(corpus: str, other: str) -> None:
    flags = EXPERTS | OTHERS[other] | LOSSES
    (alone,) = train_alone([run_of(corpus, **flags)])
    layouts = [{**TP2, **SP}, TP2, {"expert_tensor_parallel_size": 2, "micro_batch_size": 2}]
    by_rank = run_on_ranks(2, train_all, [run_of(corpus, **flags | one) for one in layouts])
    for at in range(len(layouts)):
        check_equal([records[at] for records in by_rank], alone)


# Of 8 tokens, 2 of 4 experts each: at least an eighth of the choices is dropped.
DROPPING: dict[str, Any] = {**LOSSES, "moe_expert_capacity_factor": 0.75}
DROPPED: dict[int, dict[str, dict[str, Any]]] = {
    1: {"recomputed": {"recompute_granularity": "full", "micro_batch_size": 4}},
    2: {
        "tp": TP2,
        "tp, split sequences": {**TP2, **SP},
        "pp, zero bubble": {**PP2, "pipeline_schedule": "zero-bubble"},
        "cp, two chunks of each rank": {"context_parallel_size": 2, "micro_batch_size": 2},
        "cp, one chunk": {
            "context_parallel_size": 2,
            "cp_comm_type": "a2a",
            "micro_batch_size": 2,
        },
        "shared out": SHARED_OUT,
    },
    4: {
        "shared out over tp, cp": {
            **TP2,
            **SP,
            "context_parallel_size": 2,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
        },
    },
}


@pytest.mark.parametrize("policy", TokenDropPolicy)
def test_a_capacity_drops_the_same_tokens_in_every_layout(
    corpus: str, policy: TokenDropPolicy
) -> None:
    flags = {**DROPPING, "moe_token_drop_policy": policy, "moe_eval_capacity_factor": 1.0}
    others = [
        {"moe_eval_capacity_factor": None},
        {"moe_expert_capacity_factor": 4.0, "moe_eval_capacity_factor": None},
        {"moe_expert_capacity_factor": None, "moe_eval_capacity_factor": None},
    ]
    alone, same_in_evaluation, roomy, unlimited = train_alone(
        [run_of(corpus, **(flags | other)) for other in ({}, *others)]
    )
    dropped = [step.dropped_tokens for step in alone.steps]
    assert all(one is not None and 1 / 8 <= one < 1 / 2 for one in dropped), dropped
    assert alone.losses == same_in_evaluation.losses
    assert alone.evaluations != same_in_evaluation.evaluations
    assert {step.dropped_tokens for step in roomy.steps} == {0.0}
    assert roomy.losses == unlimited.losses != alone.losses
    for world_size, layouts in DROPPED.items():
        if policy is TokenDropPolicy.POSITION and world_size != 2:
            continue  # what differs is the order of positions
        configs = [run_of(corpus, **flags, **layout) for layout in layouts.values()]
        by_rank = run_on_ranks(world_size, train_all, configs, timeout_s=150)
        for at, name in enumerate(layouts):
            records = [of_rank[at] for of_rank in by_rank]
            assert [step.dropped_tokens for step in records[0].steps] == dropped, name
            check_equal(records, alone)


BIASED: dict[str, Any] = {
    "moe_router_score_function": RouterScoreFunction.SIGMOID,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
    "moe_router_load_balancing_type": LoadBalancing.SEQ_AUX_LOSS,
    "moe_aux_loss_coeff": 0.1,
}
# Ways in which tokens could be counted twice, or not at all.
COUNTED: dict[int, dict[str, dict[str, Any]]] = {
    1: {"recomputed": {"recompute_granularity": "full", "micro_batch_size": 4}},
    2: {
        "the same tokens on tp ranks": TP2,
        "tokens split over tp ranks": {**TP2, **SP},
        "other layers": {**PP2, "pipeline_schedule": "zero-bubble"},
        "tokens split over cp ranks": {"context_parallel_size": 2, "micro_batch_size": 2},
        "experts elsewhere": SHARED_OUT,
        "fully sharded": {
            "micro_batch_size": 2,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "log_params_norm": True,
        },
    },
}


@pytest.mark.parametrize("world_size", COUNTED)
def test_biases_follow_the_loads_of_the_whole_batch(corpus: str, world_size: int) -> None:
    (alone,) = train_alone([run_of(corpus, **BIASED)])
    expected = whole([alone], prefix="model/")
    biases = {name: one for name, one in expected.items() if name.endswith("expert_bias")}
    assert len(biases) == 2
    for bias in biases.values():  # as far as steps are long, and not all one way
        assert len(set(bias.tolist())) > 1
        assert set(bias.div(0.05).round(decimals=9).abs().tolist()) <= {0.0, 1.0, 2.0, 3.0}
    layouts = COUNTED[world_size]
    configs = [run_of(corpus, **{**BIASED, **flags}) for flags in layouts.values()]
    by_rank = run_on_ranks(world_size, train_all, configs, timeout_s=150)
    for at, name in enumerate(layouts):
        records = [of_rank[at] for of_rank in by_rank]
        found = whole(records, prefix="model/")
        assert all(torch.equal(found[key], biases[key]) for key in biases), name
        assert_close(records[0].losses, alone.losses, FP64)
        assert_all_close(found, expected, FP64)
        loads = [(step.most_loaded_expert, step.idle_experts) for step in records[0].steps]
        assert loads == [(step.most_loaded_expert, step.idle_experts) for step in alone.steps]


def test_a_step_that_is_void_moves_no_bias(corpus: str, tmp_path: Path) -> None:
    """And a run that goes on has the biases of the one that it goes on from."""
    scaled = {"fp64": False, "fp16": True, "initial_loss_scale": 2.0**22, "hysteresis": 1}
    flags = {**BIASED, **scaled, "train_iters": 6}
    straight, saved = train_alone(
        [run_of(corpus, **flags), run_of(corpus, **flags, exit_interval=4, save=str(tmp_path))]
    )
    (resumed,) = train_alone([run_of(corpus, **flags, load=str(tmp_path))])
    skipped = [step.skipped for step in straight.steps]
    assert 0 < sum(skipped) < len(skipped)
    first, tensors = whole([saved]), whole([straight])
    (name, *_) = (name for name in tensors if name.endswith("expert_bias"))
    longest = float(tensors[name].abs().max()) / 0.05
    assert longest <= len(skipped) - sum(skipped) + 1e-3
    assert first[name].dtype == torch.float32
    again = whole([resumed])
    assert all(torch.equal(again[key], tensors[key]) for key in tensors)


def test_the_losses_of_a_router_train_another_model(corpus: str) -> None:
    """Each of the two does something, and half a weight does less."""
    flags: dict[str, Any] = LOSSES | {"moe_z_loss_coeff": 0.0}
    changes = [
        {},
        {"moe_aux_loss_coeff": 0.25},
        UNBALANCED,
        {**UNBALANCED, "moe_z_loss_coeff": 0.02},
    ]
    records = train_alone([run_of(corpus, **(flags | change)) for change in changes])
    routers = [
        torch.cat([t.flatten() for n, t in whole([r]).items() if n.endswith("router.weight")])
        for r in records
    ]
    for at, one in enumerate(routers):
        for other in routers[at + 1 :]:
            assert float((one - other).abs().max()) > 1e-3
    assert records[2].steps[0].load_balancing_loss is None
    assert balances(records[0])[-1] < balances(records[1])[-1]
    # It is no part of the loss that is reported, and the first step has the first weights.
    assert len({record.losses[0] for record in records}) == 1


def test_the_scale_of_the_loss_is_that_of_the_router_too(corpus: str) -> None:
    """In fp16, at scales that keep gradients in its range; without it one would be a 256th."""
    flags = LOSSES | {"fp64": False, "fp16": True, "clip_grad": 0.0, "train_iters": 1}
    flags |= {"moe_z_loss_coeff": 1.0}
    low, high = train_alone([run_of(corpus, **flags, loss_scale=s) for s in (16.0, 4096.0)])
    assert not any(step.skipped for record in (low, high) for step in record.steps)
    # Rounding to 11 bits; a router's losses make most of this norm.
    assert low.grad_norms[0] == pytest.approx(high.grad_norms[0], rel=1e-2)
    (task_alone,) = train_alone([run_of(corpus, **(flags | UNBALANCED), loss_scale=16.0)])
    assert abs(task_alone.grad_norms[0] / low.grad_norms[0] - 1) > 0.1


def train_shares_not_summed(configs: Sequence[RunConfig]) -> list[Record]:
    """Each tp rank takes its own part of the gradient of a share for the whole."""
    enter = moe.copy_to_tp
    moe.copy_to_tp = lambda x, tp: enter(x, tp) if x.shape[-1] != 2 else x  # type: ignore[attr-defined]
    return train_all(configs)


def train_router_not_summed(configs: Sequence[RunConfig]) -> list[Record]:
    """Each tp rank takes its part of a sequence for all that the router saw."""
    set_parameter_metadata = moe_router.set_parameter_metadata
    moe_router.set_parameter_metadata = lambda p, **given: set_parameter_metadata(
        p, **(given | {"sequence_parallel": False})
    )  # type: ignore[attr-defined]
    return train_all(configs)


def train_gate_not_summed(configs: Sequence[RunConfig]) -> list[Record]:
    """The same of the gate of the shared expert."""
    set_parameter_metadata = moe.set_parameter_metadata
    moe.set_parameter_metadata = lambda p, **given: set_parameter_metadata(  # type: ignore[attr-defined]
        p, **{name: value for name, value in given.items() if name != "sequence_parallel"}
    )
    return train_all(configs)


def train_busy_not_summed(configs: Sequence[RunConfig]) -> list[Record]:
    """How busy an expert is, each tp rank takes from its own part of a sequence."""
    moe_router.reduce_from_tp = lambda busy, tp: busy  # type: ignore[attr-defined]
    return train_all(configs)


def train_by_microbatch(configs: Sequence[RunConfig]) -> list[Record]:
    """The loss of a router is that of a micro-batch as a whole, as Megatron's aux_loss is."""
    balance = moe_router.balance_loss

    def of_all(scores: Tensor, busy: Tensor, length: int, taken: int) -> Tensor:
        batch = busy.shape[0]
        mixed = busy.sum(dim=0, keepdim=True) / batch
        return balance(scores, mixed.expand_as(busy), length, taken)

    moe_router.balance_loss = of_all
    return train_all(configs)


def train_counting_tokens(configs: Sequence[RunConfig]) -> list[Record]:
    """The loss of a router weighs as if no token of the step were masked."""
    start_step = NativeEngine.start_step

    class Nominal(RouterLoss):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, 1.0 / 8 if name == "value" else value)

    def with_nominal(self: NativeEngine, *given: Any) -> Any:
        for module in self.stage.modules():
            if isinstance(module, moe_router.Router):
                module.router_loss = Nominal(1.0)
        return start_step(self, *given)

    NativeEngine.start_step = with_nominal  # type: ignore[method-assign]
    return train_all(configs)


def train_other_experts_summed(configs: Sequence[RunConfig]) -> list[Record]:
    """Gradients of experts are summed over all replicas of the dense weights."""
    ReplicaGroups.of = lambda self, parameter: self.dense  # type: ignore[method-assign]
    return train_all(configs)


def train_read_early(configs: Sequence[RunConfig]) -> list[Record]:
    """Rows are read before they have arrived."""
    moe._Traffic.wait = lambda self: self.pending.wait().zero_()  # type: ignore[method-assign]
    return train_all(configs)


def train_sorted_by_source(configs: Sequence[RunConfig]) -> list[Record]:
    """Rows that arrive are taken to be sorted by expert."""
    real = moe.dispatch_plan

    def as_they_came(*given: Any) -> moe.DispatchPlan:
        plan = real(*given)
        order = torch.arange(len(plan.order))
        return plan._replace(order=order, back=order)

    moe.dispatch_plan = as_they_came
    return train_all(configs)


WRONG: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "shares": (train_shares_not_summed, 2, TP2),
    "router": (train_router_not_summed, 2, {**TP2, **SP}),
    "gate": (train_gate_not_summed, 2, {**TP2, **SP}),
    "busy": (train_busy_not_summed, 2, {**TP2, **SP}),
    "micro-batch": (train_by_microbatch, 1, {"micro_batch_size": 8}),
    "counted": (train_counting_tokens, 1, {}),
    "replicas of experts": (train_other_experts_summed, 2, SHARED_OUT),
    "before they arrive": (train_read_early, 2, {**SHARED_OUT, "moe_shared_expert_overlap": True}),
    "order of experts": (train_sorted_by_source, 2, SHARED_OUT),
}


@pytest.mark.parametrize("which", WRONG)
def test_the_law_would_notice(corpus: str, which: str) -> None:
    body, world_size, flags = WRONG[which]
    (alone,) = train_alone([run_of(corpus, **LOSSES)])
    by_rank = run_on_ranks(world_size, body, [run_of(corpus, **LOSSES, **flags)])
    # Ranks that hold different values of one weight are noticed too, by the bits.
    with pytest.raises(AssertionError, match=r"apart|replicas differ|==") as caught:
        check_equal([records[0] for records in by_rank], alone)
    assert "failed first" not in str(caught.value)


RESHARDED = {
    "tp, dp to pp": (
        4,
        {**TP2, **SP, "use_distributed_optimizer": True, "micro_batch_size": 2},
        2,
        PP2,
    ),
    "experts in parts to whole ones": (
        4,
        {**SHARED_OUT, "expert_tensor_parallel_size": 2, "use_distributed_optimizer": True},
        2,
        {**TP2, **SP, "expert_tensor_parallel_size": 1},
    ),
    "one to tp 4": (1, {}, 4, {"tensor_model_parallel_size": 4, "micro_batch_size": 4}),
    "tp, pp to experts that are shared out": (
        4,
        {**TP2, **PP2},
        2,
        {**SHARED_OUT, "use_distributed_optimizer": True},
    ),
    "experts that are shared out twice, to dp": (
        4,
        {**SHARED_OUT, "micro_batch_size": 1, "use_distributed_optimizer": True},
        2,
        {"micro_batch_size": 2, "use_distributed_optimizer": True},
    ),
}


@pytest.mark.parametrize("pair", RESHARDED)
def test_any_layout_loads_any_other(corpus: str, tmp_path: Path, pair: str) -> None:
    from_size, from_flags, to_size, to_flags = RESHARDED[pair]
    flags = LOSSES | {"train_iters": 4, "moe_layer_freq": "[0,1]"}
    (straight,) = train_alone([run_of(corpus, **flags)])
    saving = run_of(corpus, **flags, **from_flags, exit_interval=2, save=str(tmp_path))
    saved = [records[0] for records in run_on_ranks(from_size, train_all, [saving])]
    # A run that is over when it begins holds what it loaded.
    loading = [
        run_of(corpus, **(flags | {"train_iters": length}), **to_flags, load=str(tmp_path))
        for length in (2, 4)
    ]
    found = run_on_ranks(to_size, train_all, loading)
    loaded, before = whole([of_rank[0] for of_rank in found]), whole(saved)
    assert loaded.keys() == before.keys()
    assert all(torch.equal(loaded[name], before[name]) for name in loaded)
    records = [of_rank[1] for of_rank in found]
    assert_close(records[0].losses, straight.losses[2:], FP64)
    assert_close(records[0].grad_norms, straight.grad_norms[2:], FP64)
    assert_all_close(whole(records), whole([straight]), FP64)


def test_a_model_made_of_a_dense_one_begins_as_it(corpus: str, tmp_path: Path) -> None:
    """Its first loss is that of the dense model, in the layout in which it is trained."""
    model: dict[str, Any] = {**MODELS["llama"], "train_iters": 2}
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_layer_freq": "[0,1]"}
    (saved,) = train_alone([tiny_run(corpus, **model, save=str(tmp_path / "dense"))])

    def router(config: ModelConfig, name: str, shape: tuple[int, ...]) -> Tensor:
        return draw(weight_init(config), shape, seed=1, name=name)

    with open_source(tmp_path / "dense") as dense:
        write_sharded(UpcycledSource(dense, experts, router), tmp_path / "experts")
    flags = model | {"finetune": True}
    (straight,) = train_alone([tiny_run(corpus, **flags, load=str(tmp_path / "dense"))])
    layouts = [SHARED_OUT, {**TP2, **SP}]
    loading = [
        tiny_run(corpus, **{**flags, **experts, **one}, load=str(tmp_path / "experts"))
        for one in layouts
    ]
    for record in run_on_ranks(2, train_all, loading)[0]:
        assert_close(record.losses[:1], straight.losses[:1], FP64)
        assert abs(record.losses[1] - straight.losses[1]) > 1e-6, "then it is trained otherwise"
    assert straight.losses[0] < saved.losses[0]


def balanced_by(kind: LoadBalancing, **flags: Any) -> dict[str, Any]:
    return {**LOSSES, "moe_router_load_balancing_type": kind, **flags}


def test_other_balances_look_at_what_their_names_say(corpus: str) -> None:
    """A loss of a micro-batch of one sequence is one of that sequence, and so on up."""
    one, two, whole_batch = (
        {"micro_batch_size": 1},
        {"micro_batch_size": 2},
        {"micro_batch_size": 8},
    )
    configs = [
        balanced_by(LoadBalancing.SEQ_AUX_LOSS),
        balanced_by(LoadBalancing.AUX_LOSS, **one),
        balanced_by(LoadBalancing.AUX_LOSS, **two),
        balanced_by(LoadBalancing.AUX_LOSS, **whole_batch),
        balanced_by(LoadBalancing.GLOBAL_AUX_LOSS, **whole_batch),
        balanced_by(LoadBalancing.GLOBAL_AUX_LOSS, **two),
        balanced_by(LoadBalancing.SINKHORN, **two, **WITHOUT_WEIGHT),
        balanced_by(LoadBalancing.NONE, **two, **WITHOUT_WEIGHT),
    ]
    by_sequence, by_one, by_two, by_all, of_all, so_far, assigned, free = train_alone(
        [run_of(corpus, **flags) for flags in configs]
    )
    check_equal([by_one], by_sequence)
    check_equal([of_all], by_all)
    different = [record.losses[-1] for record in (by_sequence, by_two, by_all, so_far)]
    assert len({round(loss, 7) for loss in different}) == 4, different
    assert assigned.steps[0].most_loaded_expert < free.steps[0].most_loaded_expert
    # Two replicas with half of the batch each, at once.
    halves = run_of(corpus, **balanced_by(LoadBalancing.GLOBAL_AUX_LOSS, micro_batch_size=4))
    check_equal([records[0] for records in run_on_ranks(2, train_all, [halves])], by_all)
    # Of equal micro-batches, whatever else is split.
    same = [{**TP2, **two}, {**TP2, **SP, **two}, {**PP2, **two}]
    same.append({"context_parallel_size": 2, **two})
    kinds = (LoadBalancing.AUX_LOSS, LoadBalancing.GLOBAL_AUX_LOSS)  # in turn
    configs = [balanced_by(kinds[at % 2], **layout) for at, layout in enumerate(same)]
    sinkhorn = balanced_by(LoadBalancing.SINKHORN, **{**PP2, **two}, **WITHOUT_WEIGHT)
    by_rank = run_on_ranks(2, train_all, [run_of(corpus, **one) for one in [*configs, sinkhorn]])
    for at, expected in enumerate([by_two, so_far] * 2):
        check_equal([records[at] for records in by_rank], expected)
    assert_close(by_rank[0][-1].losses, assigned.losses, FP64)


WITHOUT_WEIGHT = {"moe_aux_loss_coeff": 0.0}
DEEPSPEED: dict[str, dict[str, Any]] = {
    **{f"zero {n}": {"zero_stage": str(n), "micro_batch_size": 2} for n in range(4)},
    "tp, parts on a ring": {
        **TP2,
        **SP,
        "tp_comm_overlap": True,
        "zero_stage": "1",
        "recompute_granularity": "full",
    },
    "pp": {**PP2, "zero_stage": "0"},
}


def test_deepspeed_trains_the_same_experts(corpus: str) -> None:
    flags = LOSSES | {"fp64": False, "adam_eps": 1e-4, "expert_interval": 2}
    (alone,) = train_alone([run_of(corpus, **flags)])
    configs = [run_of(corpus, **flags, deepspeed=True, **layout) for layout in DEEPSPEED.values()]
    by_rank = run_on_ranks(2, train_all, configs, timeout_s=200, deepspeed=True)
    for at, name in enumerate(DEEPSPEED):
        found = [records[at] for records in by_rank]
        try:
            assert_close(found[0].losses, alone.losses, FP32)
            assert_close(found[0].grad_norms, alone.grad_norms, FP32)
            assert_close(balances(found[0]), balances(alone), FP32)
            assert_all_close(whole(found), whole([alone]), FP32)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_deepspeed_scales_the_losses_of_a_router_in_fp16(corpus: str) -> None:
    """At stage 0, where this engine multiplies by the scale itself, and in a pipeline of it."""
    flags = LOSSES | {"moe_z_loss_coeff": 1.0, "fp64": False, "fp16": True, "clip_grad": 0.0}
    flags |= {"train_iters": 1, "loss_scale": 256.0}
    (alone,) = train_alone([run_of(corpus, **flags)])
    layouts = [{"zero_stage": "0", "micro_batch_size": 2}, {**PP2, "zero_stage": "0"}]
    configs = [run_of(corpus, **flags, deepspeed=True, **layout) for layout in layouts]
    for records in zip(*run_on_ranks(2, train_all, configs, deepspeed=True)):
        assert records[0].grad_norms[0] == pytest.approx(alone.grad_norms[0], rel=1e-2)


def test_what_deepspeed_writes_of_experts_goes_on_natively(corpus: str, tmp_path: Path) -> None:
    """In DeepSpeed's own layout, whose files hold shares of flat buffers."""
    flags: dict[str, Any] = {"fp64": False, "adam_eps": 1e-4, "train_iters": 4}
    (straight,) = train_alone([run_of(corpus, **flags)])
    saving = run_of(
        corpus,
        **flags,
        **TP2,
        deepspeed=True,
        zero_stage="2",
        checkpoint_format="deepspeed",
        exit_interval=2,
        save=str(tmp_path),
    )
    run_on_ranks(4, train_all, [saving], timeout_s=120, deepspeed=True)
    loading = run_of(corpus, **flags, **PP2, load=str(tmp_path))
    records = [of_rank[0] for of_rank in run_on_ranks(2, train_all, [loading])]
    assert_close(records[0].losses, straight.losses[2:], FP32)
    assert_close(records[0].grad_norms, straight.grad_norms[2:], FP32)
