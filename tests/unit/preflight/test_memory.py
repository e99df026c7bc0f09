"""What a step of training holds is counted, and compared with the memory that is there."""

from typing import Any

import pytest

from megatron import device, host
from megatron.config.deepspeed.plan import deepspeed_plan
from megatron.model.accounting import expert_parameters, parameter_count
from megatron.model_build import vocabulary
from megatron.planning.rehearsal import rehearse
from megatron.preflight.activations import least_activation_bytes
from megatron.preflight.memory import (
    KeptBytes,
    even_kept_bytes,
    kept_bytes,
    least_bytes,
    training_fits_in_memory,
    zero_bytes,
)
from tests.support.tiny import tiny_run
from tests.unit.engine.engines import tiny_engine
from tests.unit.planning.worlds import OF_TASK, plan_of_world, planned_world
from tests.unit.preflight.plans import found, only, plan

CHECK = training_fits_in_memory


@pytest.mark.parametrize(
    ("flags", "per_parameter"),
    [
        ({}, 8 + 8 + 16),
        ({"fp64": False}, 4 + 4 + 8),
        ({"bf16": True}, 2 + 4 + 8 + 2),
        ({"bf16": True, "exp_avg_dtype": "bf16"}, 2 + 4 + (2 + 4) + 2),
        ({"bf16": True, "accumulate_allreduce_grads_in_fp32": False}, 2 + 2 + 8 + 4),
        ({"bf16": True, "optimizer": "lion"}, 2 + 4 + 4 + 4),
        ({"bf16": True, "optimizer_cpu_offload": True}, 2 + 4 + 8 + 4),
        ({"fp16": True}, 2 + 4 + 8 + 4),
        ({"optimizer": "sgd"}, 8 + 8 + 8),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, 8 + 8),
    ],
)
def test_it_is_what_an_engine_of_these_flags_holds(
    flags: dict[str, Any], per_parameter: int
) -> None:
    expected = kept_bytes(tiny_run("nowhere", **flags), 1000)
    assert expected.total == 1000 * per_parameter
    engine = tiny_engine(**flags, make_vocab_size_divisible_by=1)  # no rows that are not stored
    parameters = sum(p.numel() for p in engine.stage.parameters())
    kept = [*map(engine.values, engine.stage.parameters()), *engine.optimizer.kept()]
    held = sum(tensor.numel() * tensor.element_size() for tensor in kept)
    gradients = expected.gradients // 1000 * parameters
    assert held + gradients == per_parameter * parameters


def test_replicas_share_the_optimizer_s_state_alone() -> None:
    config = tiny_run("nowhere")
    whole, shared = kept_bytes(config, 100), kept_bytes(config, 100, updated=25)
    assert (shared.weights, shared.gradients) == (whole.weights, whole.gradients)
    assert shared.optimizer == whole.optimizer // 4


def test_replicas_share_gradients_and_weights_too_if_asked() -> None:
    whole = kept_bytes(tiny_run("nowhere"), 100)
    for strategy, shared in (
        ("optim_grads", ["gradients", "optimizer"]),
        ("optim_grads_params", ["weights", "gradients", "optimizer"]),
    ):
        config = tiny_run("nowhere", data_parallel_sharding_strategy=strategy)
        kept = kept_bytes(config, 100, updated=25)
        for part in ("weights", "gradients", "optimizer"):
            share = 4 if part in shared else 1
            assert getattr(kept, part) == getattr(whole, part) // share, (strategy, part)


RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
OPTIMIZER = {"use_distributed_optimizer": True}
ALL = {"data_parallel_sharding_strategy": "optim_grads_params"}


def test_the_fix_is_what_costs_least_of_what_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"seq_length": 4}  # so that recomputing saves less than sharing out
    recompute = " ".join(
        ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    )
    fixes = [
        (RECOMPUTED, recompute),
        (OPTIMIZER, "--use-distributed-optimizer"),
        (OPTIMIZER | RECOMPUTED, f"--use-distributed-optimizer {recompute}"),
        (ALL, "--data-parallel-sharding-strategy optim_grads_params"),
        (ALL | RECOMPUTED, f"--data-parallel-sharding-strategy optim_grads_params {recompute}"),
    ]
    for flags, fix in fixes:
        room = needed(2, **short, **flags)
        monkeypatch.setattr(host, "available_memory_bytes", lambda room=room: room)
        (error,) = found(CHECK, plan(world_size=2, **short))
        assert error.fix == f"add {fix}"
    monkeypatch.setattr(host, "available_memory_bytes", lambda: room - 1)
    only(found(CHECK, plan(world_size=2, **short)), "fix: spread the model over at least")


def test_deepspeed_is_asked_to_share_more_out(monkeypatch: pytest.MonkeyPatch) -> None:
    through = {"deepspeed": True, "bf16": True, "fp64": False, "seq_length": 4}
    for stage in ("1", "2", "3"):
        room = needed(2, **through, zero_stage=stage)
        monkeypatch.setattr(host, "available_memory_bytes", lambda room=room: room)
        assert found(CHECK, plan(world_size=2, **through, zero_stage=stage)) == []
    (error,) = found(CHECK, plan(world_size=2, **through, zero_stage="1"))
    assert error.fix == "add --zero-stage 3"
    # What contradicts DeepSpeed's file is another check's to report.
    assert found(CHECK, plan(**through, deepspeed_config="nowhere.json")) == []


@pytest.mark.parametrize(
    ("flags", "weights", "gradients", "optimizer", "waiting"),
    [
        ({}, 200, 400, 1000, 0),  # our own optimizer, with gradients in fp32
        ({"zero_stage": "1"}, 200, 50, 300, 0),
        ({"zero_stage": "2"}, 200, 50, 300, 0),
        ({"zero_stage": "3"}, 50, 50, 300, 0),
        ({"zero_stage": "2", "cpu_optimizer": True}, 200, 0, 300, 300),
        ({"zero_stage": "3", "cpu_optimizer": True, "remote_device": "cpu"}, 50, 0, 300, 350),
    ],
)
def test_zero_shares_out_what_its_stage_says(
    flags: dict[str, Any], weights: int, gradients: int, optimizer: int, waiting: int
) -> None:
    config = tiny_run("nowhere", deepspeed=True, bf16=True, **flags)
    kept = zero_bytes(config, deepspeed_plan(config, data_parallel_size=4), 100, 25)
    assert (kept.weights, kept.gradients) == (weights, gradients)
    assert (kept.optimizer, kept.waiting) == (optimizer, waiting)


def test_a_rank_holds_its_share_of_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"num_experts": 8, "add_bias_linear": False, "moe_ffn_hidden_size": 64}
    alone = plan(world_size=4, **flags)
    parameters = parameter_count(alone.config.model, 52, alone.config.data.seq_length)
    experts = expert_parameters(alone.config.model)
    assert alone.tokenizer is not None
    assert vocabulary(alone.config, alone.tokenizer).padded == 52
    kept = kept_bytes(alone.config, parameters - experts + experts // 4).total
    fits = 4 * (kept + least_activation_bytes(alone.config, 4)[0])
    monkeypatch.setattr(host, "available_memory_bytes", lambda: fits)
    assert found(CHECK, plan(world_size=4, **flags, expert_model_parallel_size=4)) == []
    only(found(CHECK, plan(world_size=4, **flags, expert_model_parallel_size=2)), "not fit")


@pytest.mark.parametrize("task", ["gpt", *OF_TASK])
def test_weights_and_state_are_those_of_a_rehearsed_step(task: str) -> None:
    world = planned_world(1, **OF_TASK.get(task, {}), bf16=True, make_vocab_size_divisible_by=4)
    (rank,) = rehearse(world, [0])
    kept = even_kept_bytes(plan_of_world(world))
    assert (kept.weights, kept.optimizer) == (rank.bytes.weights, rank.bytes.optimizer)
    assert kept.gradients <= rank.bytes.gradients  # whose buffers are padded
    assert least_bytes(plan_of_world(world)).total <= rank.bytes.peak


def test_one_tower_for_both_texts_is_counted_once_and_saves_for_both() -> None:
    flags = OF_TASK["ict"] | {"bf16": True}
    two, one = (
        least_bytes(plan_of_world(planned_world(1, **flags, **more)))
        for more in ({}, {"biencoder_shared_query_context_model": True})
    )
    assert (two.weights, two.activations) == (2 * one.weights, one.activations)


def least(ranks: int = 1, **flags: Any) -> KeptBytes:
    return least_bytes(plan(world_size=ranks, **flags))


def needed(ranks: int = 1, **flags: Any) -> int:
    """Bytes that all ranks of the host hold at the peak of a step."""
    return ranks * least(ranks, **flags).total


def test_memory_that_is_just_enough_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory_bytes", lambda: needed())
    assert found(CHECK, plan()) == []
    monkeypatch.setattr(host, "available_memory_bytes", lambda: needed() - 1)
    only(found(CHECK, plan()), "does not fit into memory", "(weights 0.00 GiB", "add --recompute")
    monkeypatch.setattr(host, "available_memory_bytes", lambda: needed(**RECOMPUTED) - 1)
    only(found(CHECK, plan()), "over at least 2 ranks", "a smaller --micro-batch-size")
    monkeypatch.setattr(host, "available_memory_bytes", lambda: None)
    assert found(CHECK, plan()) == []


def test_ranks_of_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory_bytes", lambda: needed(2) - 1)
    findings = found(CHECK, plan(world_size=2))
    only(findings, "on each of 2 ranks of this host", "fix: add --recompute-granularity full")
    assert found(CHECK, plan(world_size=2, use_distributed_optimizer=True)) == []
    short = {"world_size": 2, "seq_length": 4}  # of which weights and state take nearly all
    monkeypatch.setattr(host, "available_memory_bytes", lambda: needed(2, seq_length=4) * 2 // 3)
    assert len(found(CHECK, plan(**short))) == 1
    assert found(CHECK, plan(**short, tensor_model_parallel_size=2)) == []


def test_a_gpu_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda_is_available", lambda: True)
    monkeypatch.setattr(device, "total_memory_bytes", lambda index: needed() - (index == 1))
    asked = plan(world_size=2, device="auto")
    assert found(CHECK, asked) == []


def test_state_that_waits_on_the_host_takes_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = {"device": "auto", "optimizer_cpu_offload": True}
    kept = least(2, **waiting)
    on_gpu, on_host = kept.total - kept.waiting, kept.waiting
    monkeypatch.setattr(device, "cuda_is_available", lambda: True)
    monkeypatch.setattr(device, "total_memory_bytes", lambda index: on_gpu)
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 2 * on_host)
    only(found(CHECK, plan(world_size=2, device="auto")), "does not fit into memory")
    assert found(CHECK, plan(world_size=2, **waiting)) == []
    only(found(CHECK, plan(world_size=2, **waiting, optimizer_offload_fraction=0.9)), "not fit")
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 2 * on_host - 1)
    only(
        found(CHECK, plan(world_size=2, **waiting)),
        "does not fit into the memory of the host",
        "each of 2 ranks",
        "--optimizer-offload-fraction",
    )
    monkeypatch.setattr(device, "cuda_is_available", lambda: False)  # nothing leaves a CPU
    monkeypatch.setattr(host, "available_memory_bytes", lambda: needed() - 1)
    only(found(CHECK, plan(optimizer_cpu_offload=True)), "does not fit into memory")


def test_what_another_check_says_is_not_said_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 0)
    assert found(CHECK, plan(world_size=3, tensor_model_parallel_size=2)) == []
    assert (
        found(CHECK, plan(world_size=2, tensor_model_parallel_size=2, pad_vocab_size_to=129)) == []
    )
