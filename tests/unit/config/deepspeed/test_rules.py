"""The blocks `optimizer` and `scheduler` agree with the flags, or are refused."""

from typing import Any

import pytest

from megatron.config.deepspeed.rules import optimizer_problems, scheduler_problems
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from tests.support.tiny import tiny_run


def run_of(**flags: Any) -> RunConfig:
    return tiny_run("nowhere", **({} if "train_samples" in flags else {"train_iters": 5}), **flags)


def of_optimizer(kind: str | None, params: dict[str, Any], **flags: Any) -> list[ConfigError]:
    """What is wrong with a block `optimizer` under these flags."""
    user = {"optimizer": {"type": kind, "params": params}}
    return list(optimizer_problems(tiny_run("nowhere", **flags), user, "ds.json"))


def of_scheduler(kind: str, params: dict[str, Any], **flags: Any) -> list[ConfigError]:
    """What is wrong with a block `scheduler` under these flags."""
    user = {"scheduler": {"type": kind, "params": params}}
    return list(scheduler_problems(run_of(**flags), user, "ds.json"))


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "adamw", "auto", None])
def test_an_optimizer_that_agrees_is_accepted(kind: str | None) -> None:
    params = {
        "lr": 0.01,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.01,
        "torch_adam": True,
        "adam_w_mode": True,
    }
    assert of_optimizer(kind, params) == []


@pytest.mark.parametrize(
    ("params", "spelled"),
    [
        ({"lr": 0.02}, "--lr 0.01; optimizer.params.lr 0.02 in ds.json"),
        ({"betas": [0.9, 0.95]}, "--adam-beta1 0.9 --adam-beta2 0.999; "),
        ({"eps": 1e-6}, "--adam-eps 1e-08; "),
        ({"weight_decay": 0.1}, "--weight-decay 0.01; "),
        ({"momentum": 0.5}, "--sgd-momentum 0.9; "),
        ({"adam_w_mode": False}, "the update rule that --optimizer names; "),
        ({"amsgrad": True}, "the update rule that --optimizer names; "),
    ],
)
def test_an_optimizer_that_disagrees_is_refused(params: dict[str, Any], spelled: str) -> None:
    (error,) = of_optimizer("AdamW", params)
    assert error.problem == "the flags and DeepSpeed's JSON contradict each other"
    assert str(error.found).startswith(spelled)


def test_another_kind_of_optimizer_is_refused() -> None:
    (error,) = of_optimizer("SGD", {"lr": 5})
    assert str(error.found) == "--optimizer adam; optimizer.type SGD in ds.json"
    assert of_optimizer("SGD", {"lr": 0.01, "momentum": 0.9}, optimizer="sgd") == []


def test_an_optimizer_that_is_not_here_is_refused() -> None:
    (error,) = of_optimizer("OneBitAdam", {"freeze_step": 10})
    assert error.problem == "DeepSpeed's JSON names an optimizer that is not here"


def test_clipping_by_the_optimizer_is_refused_as_deepspeed_refuses_it() -> None:
    (error,) = of_optimizer("AdamW", {"max_grad_norm": 1.0})
    assert error.problem == "gradients are clipped by one number, which is not the optimizer's"


def test_a_weight_decay_that_moves_is_not_one_number() -> None:
    moving = {
        "weight_decay_incr_style": "linear",
        "start_weight_decay": 0.0,
        "end_weight_decay": 0.1,
    }
    (error,) = of_optimizer("AdamW", {"weight_decay": 0.01}, **moving)
    assert str(error.found).startswith("--weight-decay-incr-style linear; ")


@pytest.mark.parametrize("block", [of_optimizer, of_scheduler])
def test_an_unknown_parameter_is_refused_with_the_nearest(block: Any) -> None:
    kind = {of_optimizer: "AdamW", of_scheduler: "WarmupDecayLR"}[block]
    (error,) = block(kind, {"weight_decai": 1} if block is of_optimizer else {"warmup_max": 1})
    assert error.problem.startswith("DeepSpeed's JSON has a parameter in its block ")
    assert error.fix.startswith("did you mean w")


def test_a_schedule_that_agrees_is_accepted() -> None:
    params = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.01,
        "warmup_num_steps": 2,
        "warmup_type": "linear",
        "total_num_steps": 5,
        "last_batch_iteration": -1,
    }
    assert of_scheduler("WarmupDecayLR", params, lr_warmup_iters=2) == []
    by_share = {"lr_warmup_fraction": 0.4}
    assert of_scheduler("WarmupDecayLR", params, **by_share) == []
    by_samples = {"train_samples": 40, "lr_warmup_samples": 16}
    assert of_scheduler("WarmupDecayLR", params, **by_samples) == []


def test_a_cosine_agrees_by_its_ratios() -> None:
    params = {"total_num_steps": 4, "cos_min_ratio": 0.1, "warmup_min_ratio": 0.0}
    flags = {"lr_decay_style": "cosine", "min_lr": 0.001, "lr_decay_iters": 4}
    assert of_scheduler("WarmupCosineLR", params, **flags) == []


@pytest.mark.parametrize(
    ("params", "spelled"),
    [
        ({"warmup_max_lr": 0.1}, "--lr 0.01; "),
        ({"warmup_num_steps": 3}, "--lr-warmup-iters 0; "),
        ({"total_num_steps": 9}, "--train-iters 5; "),
        ({"warmup_type": "log"}, "warm-up is linear here; "),
    ],
)
def test_a_schedule_that_disagrees_is_refused(params: dict[str, Any], spelled: str) -> None:
    (error,) = of_scheduler("WarmupDecayLR", params)
    assert error.problem == "the flags and DeepSpeed's JSON contradict each other"
    assert str(error.found).startswith(spelled)


def test_another_shape_is_refused() -> None:
    (error,) = of_scheduler("WarmupLR", {})
    assert str(error.found).startswith("--lr-decay-style linear; scheduler.type WarmupLR")


def test_a_schedule_that_is_not_here_is_refused() -> None:
    (error,) = of_scheduler("OneCycle", {"cycle_min_lr": 1})
    assert error.problem == "DeepSpeed's JSON names a schedule that is not here"


def test_no_blocks_are_no_problem() -> None:
    assert list(optimizer_problems(tiny_run("nowhere"), {}, "ds.json")) == []
    assert list(scheduler_problems(tiny_run("nowhere"), {}, "ds.json")) == []
