"""Every check of ranks that share sequences: silent on a good plan, its message on a bad one."""

from dataclasses import replace
from typing import Any

import pytest

from megatron.config.parallel import ContextExchange
from megatron.config.training import AttentionBackend
from megatron.errors import ConfigError
from megatron.model.attention import SelfAttention
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.topology import Topology
from megatron.preflight import context_parallel
from tests.support.models import tiny_build, tiny_config
from tests.unit.preflight.plans import found, only, plan

SHARED: dict[str, Any] = {"context_parallel_size": 2}
CURRICULUM: dict[str, Any] = {
    "curriculum_schedule": "fixed_linear",
    "curriculum_seqlen_min": 4,
    "curriculum_seqlen_step": 2,
    "curriculum_iters": 4,
}


@pytest.mark.parametrize("exchange", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("check", context_parallel.CHECKS)
def test_a_good_plan_passes(check: Any, exchange: str) -> None:
    for flags in ({}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}):
        good = plan(world_size=4, **SHARED, cp_comm_type=exchange, **flags)
        assert found(check, good) == []
    assert found(check, plan(world_size=2, seq_length=7, attention_dropout=0.1)) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"seq_length": 14}, ["--seq-length 14", "multiples of 4"]),
        ({"seq_length": 13, "cp_comm_type": "a2a"}, ["--cp-comm-type a2a", "multiples of 2"]),
        (
            {
                "seq_length": 12,
                "tensor_model_parallel_size": 4,
                "sequence_parallel": True,
            },
            ["--sequence-parallel with --tensor-model-parallel-size 4", "multiples of 8"],
        ),
        (
            {
                "seq_length": 12,
                "tensor_model_parallel_size": 3,
                "sequence_parallel": True,
                "cp_comm_type": "a2a",
                "context_parallel_size": 3,
            },
            ["--context-parallel-size 3", "multiples of 9"],
        ),
    ],
    ids=str,
)
def test_sequences_that_do_not_divide_are_refused(flags: dict[str, Any], words: list[str]) -> None:
    check = context_parallel.sequences_split_over_context_parallel_ranks
    only(found(check, plan(world_size=8, **SHARED | flags)), "cannot be shared out evenly", *words)


def test_every_length_of_a_curriculum_has_to_divide() -> None:
    check = context_parallel.sequences_split_over_context_parallel_ranks
    bad = plan(world_size=2, **SHARED, **CURRICULUM)
    only(found(check, bad), "6 tokens of ", "multiples of 4")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"context_parallel_size": 3, "cp_comm_type": "a2a"},
            ["heads cannot be shared out", "--num-attention-heads 4", "--cp-comm-type p2p"],
        ),
        (
            {"attention_dropout": 0.1},
            ["by kernels without dropout", "--attention-dropout 0.1", "--cp-comm-type a2a"],
        ),
        (
            {"attention_soft_cap": 50.0},
            ["by kernels without a soft cap", "--attention-soft-cap 50.0", "--cp-comm-type a2a"],
        ),
        (
            {"attention_backend": "unfused", "cp_comm_type": "all_gather"},
            ["--cp-comm-type all_gather, --attention-backend unfused"],
        ),
    ],
    ids=str,
)
def test_attention_that_ranks_cannot_share_is_refused(
    flags: dict[str, Any], words: list[str]
) -> None:
    check = context_parallel.attention_can_share_sequences
    only(found(check, plan(world_size=6, **SHARED | flags)), *words)
    assert found(check, plan(world_size=6, **flags | {"context_parallel_size": 1})) == []
    # Nor does a model that is built without these checks ignore it.
    size = flags.get("context_parallel_size", 2)
    ctx = replace(
        ParallelContext.single(), topology=Topology(cp=size), cp=Group(tuple(range(size)), 0)
    )
    build = replace(
        tiny_build(),
        ctx=ctx,
        context_exchange=ContextExchange(flags.get("cp_comm_type", "p2p")),
        attention_backend=AttentionBackend(flags.get("attention_backend", "auto")),
    )
    names = ("attention_dropout", "attention_soft_cap")
    config = tiny_config(**{name: flags[name] for name in names if name in flags})
    with pytest.raises(ConfigError, match=words[0].split(",")[0]):
        SelfAttention(config, build, layer=0)


def test_soft_caps_of_scores_are_computed_by_no_fused_kernel() -> None:
    check = context_parallel.attention_can_share_sequences
    capped = {"attention_soft_cap": 50.0}
    bad = plan(**capped, attention_backend="flash")
    only(found(check, bad), "by no fused kernel", "--attention-backend flash")
    assert found(check, plan(**capped, attention_backend="unfused")) == []


@pytest.mark.parametrize("flag", ["deepspeed", "compile"])
def test_engines_that_cannot_share_sequences_refuse_it_by_name(flag: str) -> None:
    check = context_parallel.engine_can_share_sequences
    bad = plan(world_size=2, **SHARED, **{flag: True})
    only(found(check, bad), "ranks cannot share sequences", f"--context-parallel-size 2, --{flag}")
    assert found(check, plan(world_size=2, **{flag: True})) == []
