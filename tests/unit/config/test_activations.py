"""Which choices about saved activations go together, and what they leave open."""

from typing import Any

import pytest

from megatron.config.activations import (
    ALL_LAYERS,
    ActivationPolicy,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
    activation_problems,
)
from megatron.config.training import TrainingConfig
from megatron.errors import ConfigError

FULL, SELECTIVE = RecomputeGranularity.FULL, RecomputeGranularity.SELECTIVE
NORM = RecomputeModule.LAYERNORM


def training(**flags: Any) -> TrainingConfig:
    return TrainingConfig(micro_batch_size=1, train_iters=1, **flags)


def test_nothing_is_recomputed_or_offloaded_unless_asked_for() -> None:
    assert training().activations == ActivationPolicy()


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ({"recompute_granularity": FULL}, {"method": RecomputeMethod.UNIFORM}),
        (
            {
                "recompute_granularity": FULL,
                "recompute_method": RecomputeMethod.BLOCK,
                "recompute_num_layers": 3,
                "distribute_saved_activations": True,
            },
            {"method": RecomputeMethod.BLOCK, "num_layers": 3, "distribute": True},
        ),
        (
            {"recompute_granularity": SELECTIVE},
            {"modules": frozenset({RecomputeModule.CORE_ATTN})},
        ),
        (
            {"recompute_granularity": SELECTIVE, "recompute_modules": (NORM, NORM)},
            {"modules": frozenset({NORM})},
        ),
        ({"cpu_offloading_num_layers": 2}, {"offload_layers": 2}),
        ({"checkpoint_in_cpu": True}, {"offload_layers": ALL_LAYERS}),
    ],
)
def test_what_a_granularity_leaves_open_is_filled_in(
    flags: dict[str, Any], policy: dict[str, Any]
) -> None:
    assert training(**flags).activations == ActivationPolicy(**policy)


@pytest.mark.parametrize(
    ("flags", "problem", "found"),
    [
        (
            {"recompute_method": RecomputeMethod.BLOCK, "recompute_num_layers": 2},
            "recomputed as a whole was given, and none are",
            "--recompute-method --recompute-num-layers without recomputation",
        ),
        (
            {"recompute_granularity": SELECTIVE, "distribute_saved_activations": True},
            "recomputed as a whole was given, and none are",
            "--distribute-saved-activations with --recompute-granularity selective",
        ),
        (
            {"recompute_granularity": FULL, "recompute_modules": (RecomputeModule.MLP,)},
            "recomputation is not selective",
            "--recompute-modules mlp with --recompute-granularity full",
        ),
        (
            {
                "recompute_granularity": SELECTIVE,
                "recompute_modules": (NORM,),
                "cpu_offloading_num_layers": 1,
            },
            "cannot be both recomputed and kept in host memory",
            "--recompute-modules layernorm, --cpu-offloading-num-layers 1",
        ),
        (
            {
                "recompute_granularity": SELECTIVE,
                "recompute_modules": (NORM,),
                "checkpoint_in_cpu": True,
            },
            "cannot be both recomputed and kept in host memory",
            "--recompute-modules layernorm, --checkpoint-in-cpu",
        ),
        (
            {
                "recompute_granularity": SELECTIVE,
                "recompute_modules": (RecomputeModule.ACTIVATION,),
                "cpu_offloading_num_layers": 2,
            },
            "cannot be both recomputed and kept in host memory",
            "--recompute-modules act, --cpu-offloading-num-layers 2",
        ),
        (
            {"cpu_offloading_num_layers": 1, "checkpoint_in_cpu": True},
            "named twice",
            "--checkpoint-in-cpu, --cpu-offloading-num-layers 1",
        ),
        (
            {"recompute_granularity": FULL, "recompute_num_layers": 0},
            "it is not positive",
            "--recompute-num-layers 0",
        ),
        (
            {"cpu_offloading_num_layers": -1},
            "it cannot be negative",
            "--cpu-offloading-num-layers -1",
        ),
    ],
)
def test_contradictions_are_refused(flags: dict[str, Any], problem: str, found: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        training(**flags)
    assert raised.value.found == found


def test_the_fixes_work() -> None:
    fixed = training(
        recompute_granularity=FULL,
        recompute_method=RecomputeMethod.BLOCK,
        cpu_offloading_num_layers=1,
    )
    assert list(activation_problems(fixed)) == []
