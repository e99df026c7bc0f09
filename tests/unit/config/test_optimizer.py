"""Update rule, learning rate and weight decay: what is refused."""

import math
from typing import Any

import pytest

from megatron.config.fields import FieldsError
from megatron.config.optimizer import (
    DecayStyle,
    OptimizerConfig,
    OptimizerKind,
    StateDtype,
    WeightDecayStyle,
)
from megatron.errors import ConfigError
from tests.unit.config.groups import a_schedule


@pytest.mark.parametrize(
    "name",
    ["adam_beta1", "adam_beta2", "sgd_momentum", "lion_beta1", "lion_beta2", "muon_momentum"],
)
@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_decay_rates_are_below_one(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=r"outside \[0, 1\)") as caught:
        OptimizerConfig(**{name: value})
    assert caught.value.found == f"--{name.replace('_', '-')} {value}"


def test_numbers_of_muon_are_positive_and_its_companion_updates_what_is_no_matrix() -> None:
    for name in ("muon_extra_scale_factor", "muon_num_ns_steps"):
        with pytest.raises(ConfigError, match="it is not positive"):
            OptimizerConfig(**{name: 0})
    OptimizerConfig(muon_scalar_optimizer=OptimizerKind.LION)
    for kind in (OptimizerKind.SGD, OptimizerKind.MUON):
        with pytest.raises(ConfigError, match="what is no matrix cannot be updated") as caught:
            OptimizerConfig(muon_scalar_optimizer=kind)
        assert caught.value.found == f"--muon-scalar-optimizer {kind}"


def test_a_share_that_waits_on_the_host_is_a_share_of_what_does() -> None:
    OptimizerConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    for share in (-0.1, 1.1):
        with pytest.raises(ConfigError, match=r"outside \[0, 1\]"):
            OptimizerConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=share)
    with pytest.raises(ConfigError, match="none of it leaves the device") as caught:
        OptimizerConfig(optimizer_offload_fraction=0.5)
    assert "add --optimizer-cpu-offload" in caught.value.fix
    with pytest.raises(ConfigError, match="only the state of AdamW") as caught:
        OptimizerConfig(optimizer_cpu_offload=True, optimizer=OptimizerKind.SGD)
    assert caught.value.found == "--optimizer-cpu-offload with --optimizer sgd"


@pytest.mark.parametrize(
    ("state", "beta"), [("exp_avg", "adam_beta1"), ("exp_avg_sq", "adam_beta2")]
)
def test_bf16_state_needs_a_mean_that_can_decay(state: str, beta: str) -> None:
    flag, rate = f"--{state.replace('_', '-')}-dtype", f"--{beta.replace('_', '-')}"
    narrow = {f"{state}_dtype": StateDtype.BF16}
    with pytest.raises(ConfigError, match="rounded back up in bf16") as caught:
        OptimizerConfig(**narrow, **{beta: 0.999})
    assert caught.value.found == f"{flag} bf16 with {rate} 0.999"
    OptimizerConfig(**narrow, **{beta: 0.995})
    with pytest.raises(ConfigError, match="state that this optimizer does not have") as caught:
        OptimizerConfig(**narrow, optimizer=OptimizerKind.SGD)
    assert caught.value.found == f"{flag} bf16 with --optimizer sgd"


@pytest.mark.parametrize("name", ["weight_decay", "adam_eps", "clip_grad"])
def test_amounts_are_not_negative(name: str) -> None:
    with pytest.raises(ConfigError, match="it cannot be negative"):
        OptimizerConfig(**{name: -1.0})
    assert getattr(OptimizerConfig(**{name: 0.0}), name) == 0


@pytest.mark.parametrize(
    ("changes", "problem", "found"),
    [
        ({"lr": 0.0}, "the learning rate is not a positive number", "--lr 0.0"),
        ({"lr": math.inf}, "the learning rate is not a positive number", "--lr inf"),
        ({"lr": math.nan}, "the learning rate is not a positive number", "--lr nan"),
        ({"min_lr": 1.0}, "not between 0 and the peak learning rate", "--min-lr 1.0"),
        ({"lr_warmup_init": -1.0}, "not between 0 and the peak", "--lr-warmup-init -1.0"),
        ({"decoupled_lr": 0.0}, "is not a positive number", "--decoupled-lr 0.0"),
        ({"decoupled_min_lr": 0.0}, "its peak was not", "--decoupled-min-lr 0.0 without"),
        (
            {"decoupled_lr": 0.1, "decoupled_min_lr": 0.2},
            "does not lie above where it starts and ends",
            "--decoupled-lr 0.1 with --decoupled-min-lr 0.2",
        ),
        (
            {"min_lr": 1e-4, "decoupled_lr": 1e-5},
            "does not lie above where it starts and ends",
            "--decoupled-lr 1e-05 with --min-lr 0.0001",
        ),
        (
            {"lr_warmup_init": 1e-4, "decoupled_lr": 1e-5},
            "does not lie above where it starts and ends",
            "--decoupled-lr 1e-05 with --lr-warmup-init 0.0001",
        ),
        ({"lr_warmup_iters": -1}, "it cannot be negative", "--lr-warmup-iters -1"),
        ({"lr_warmup_samples": -1}, "it cannot be negative", "--lr-warmup-samples -1"),
        ({"lr_warmup_fraction": 1.1}, "share is outside [0, 1]", "--lr-warmup-fraction 1.1"),
        (
            {"lr_warmup_iters": 5, "lr_warmup_fraction": 0.1},
            "warm-up was given in more than one unit",
            "--lr-warmup-iters 5, --lr-warmup-fraction 0.1",
        ),
        (
            {"lr_decay_iters": 5, "lr_decay_samples": 10},
            "the decay length was given in two units",
            "--lr-decay-iters 5, --lr-decay-samples 10",
        ),
        ({"lr_decay_iters": 0}, "it is not positive", "--lr-decay-iters 0"),
        ({"lr_decay_samples": 0}, "it is not positive", "--lr-decay-samples 0"),
        ({"lr_wsd_decay_iters": 0}, "it is not positive", "--lr-wsd-decay-iters 0"),
        ({"lr_wsd_decay_samples": 0}, "it is not positive", "--lr-wsd-decay-samples 0"),
        (
            {"lr_decay_style": DecayStyle.WSD},
            "a WSD schedule needs the length of its decay",
            "--lr-decay-style WSD without a decay length",
        ),
        (
            {"weight_decay_incr_style": WeightDecayStyle.LINEAR, "start_weight_decay": 0.1},
            "a moving weight decay needs both of its ends",
            "--weight-decay-incr-style linear",
        ),
        (
            {"start_weight_decay": 0.1, "end_weight_decay": 0.2},
            "the ends of a moving weight decay were given, but it is constant",
            "--start-weight-decay 0.1, --end-weight-decay 0.2",
        ),
    ],
)
def test_schedules_that_contradict_themselves_are_refused(
    changes: dict[str, Any], problem: str, found: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        a_schedule(**changes)
    assert problem in str(caught.value)
    assert found in str(caught.value)


def test_a_wsd_schedule_with_a_length_is_accepted() -> None:
    config = a_schedule(lr_decay_style=DecayStyle.WSD, lr_wsd_decay_iters=5)
    assert config.lr_wsd_decay_iters == 5


def test_all_that_is_wrong_is_said_together() -> None:
    with pytest.raises(FieldsError) as caught:
        a_schedule(lr=-1.0, lr_warmup_iters=-1, lr_decay_iters=0)
    assert len(caught.value.errors) >= 3


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            {"lr_warmup_tokens": 5},
            "warm-up is in tokens, and the decay of the learning rate is not",
        ),
        (
            {"lr_decay_tokens": 50, "lr_decay_style": DecayStyle.WSD, "lr_wsd_decay_iters": 5},
            "a WSD schedule is in iterations or samples",
        ),
        (
            {"lr_decay_tokens": 50, "lr_decay_samples": 5},
            "the decay length was given in two units",
        ),
        ({"lr_decay_tokens": 0}, "it is not positive"),
    ],
)
def test_a_schedule_is_in_tokens_as_a_whole_or_not_at_all(
    flags: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        a_schedule(**flags)
