"""What training keeps is counted in full, and compared with the memory that is there."""

from typing import Any

import pytest

from megatron import device, host
from megatron.model.accounting import expert_parameters, parameter_count
from megatron.model_build import vocabulary
from megatron.preflight.memory import kept_bytes, weights_and_state_fit_in_memory
from tests.support.tiny import tiny_run
from tests.unit.engine.engines import tiny_engine
from tests.unit.preflight.plans import found, only, plan

CHECK = weights_and_state_fit_in_memory


@pytest.mark.parametrize(
    ("flags", "per_parameter"),
    [
        ({}, 8 + 8 + 16),
        ({"fp64": False}, 4 + 4 + 8),
        ({"bf16": True}, 2 + 4 + 8 + 4),
        ({"bf16": True, "exp_avg_dtype": "bf16"}, 2 + 4 + (2 + 4) + 4),
        ({"optimizer": "sgd"}, 8 + 8 + 8),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, 8 + 8),
    ],
)
def test_it_is_what_an_engine_of_these_flags_holds(
    flags: dict[str, Any], per_parameter: int
) -> None:
    kept = kept_bytes(tiny_run("nowhere", **flags), 1000)
    assert kept.total == 1000 * per_parameter
    engine = tiny_engine(**flags, make_vocab_size_divisible_by=1)  # no rows that are not stored
    parameters = sum(p.numel() for p in engine.stage.parameters())
    held = sum(
        part.view.numel() * part.view.element_size()
        for tensor in engine.state(optimizer=True).tensors
        for part in tensor.parts
    )
    gradients = kept.gradients // 1000 * parameters
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


def test_the_least_that_fits_is_what_should_be_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # 32 bytes a parameter, 24 with the optimizer shared out over two ranks, and 16 with all.
    for of_whole, fix in (
        (24 / 32 + 0.01, "add --use-distributed-optimizer"),
        (16 / 32 + 0.01, "add --data-parallel-sharding-strategy optim_grads_params"),
        (16 / 32 - 0.01, "over at least"),
    ):
        monkeypatch.setattr(host, "available_memory_bytes", lambda f=of_whole: int(needed(2) * f))
        only(found(CHECK, plan(world_size=2)), f"fix: {fix}" if "add" in fix else fix)


def test_a_rank_holds_its_share_of_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"num_experts": 8, "add_bias_linear": False, "moe_ffn_hidden_size": 64}
    alone = plan(world_size=4, **flags)
    parameters = parameter_count(alone.config.model, 52, alone.config.data.seq_length)
    experts = expert_parameters(alone.config.model)
    assert alone.tokenizer is not None
    assert vocabulary(alone.config, alone.tokenizer).padded == 52
    fits = 4 * kept_bytes(alone.config, parameters - experts + experts // 4).total
    monkeypatch.setattr(host, "available_memory_bytes", lambda: fits)
    assert found(CHECK, plan(world_size=4, **flags, expert_model_parallel_size=4)) == []
    only(found(CHECK, plan(world_size=4, **flags, expert_model_parallel_size=2)), "do not fit")


def needed(ranks: int = 1, **flags: Any) -> int:
    """Bytes that all ranks of the host keep."""
    asked = plan(world_size=ranks, **flags)
    assert asked.tokenizer is not None
    rows = vocabulary(asked.config, asked.tokenizer).padded
    parameters = parameter_count(asked.config.model, rows, asked.config.data.seq_length)
    return ranks * kept_bytes(asked.config, parameters // asked.model_ranks).total


def test_memory_that_is_just_enough_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory_bytes", lambda: needed())
    assert found(CHECK, plan()) == []
    monkeypatch.setattr(host, "available_memory_bytes", lambda: needed() - 1)
    only(
        found(CHECK, plan()), "do not fit into memory", "(weights 0.00 GiB", "over at least 2 ranks"
    )
    monkeypatch.setattr(host, "available_memory_bytes", lambda: None)
    assert found(CHECK, plan()) == []


def test_ranks_of_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory_bytes", lambda: needed(2) - 1)
    findings = found(CHECK, plan(world_size=2))
    only(findings, "on each of 2 ranks of this host", "fix: add --use-distributed-optimizer")
    assert found(CHECK, plan(world_size=2, use_distributed_optimizer=True)) == []
    assert found(CHECK, plan(world_size=2, tensor_model_parallel_size=2)) == []


def test_a_gpu_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda_is_available", lambda: True)
    monkeypatch.setattr(device, "total_memory_bytes", lambda index: needed() - (index == 1))
    asked = plan(world_size=2, device="auto")
    assert found(CHECK, asked) == []


def test_state_that_waits_on_the_host_takes_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = {"device": "auto", "optimizer_cpu_offload": True}
    on_gpu, on_host = needed() // 2, needed() // 2  # 16 of 32 bytes a parameter
    monkeypatch.setattr(device, "cuda_is_available", lambda: True)
    monkeypatch.setattr(device, "total_memory_bytes", lambda index: on_gpu)
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 2 * on_host)
    only(found(CHECK, plan(world_size=2, device="auto")), "do not fit into memory")
    assert found(CHECK, plan(world_size=2, **waiting)) == []
    only(found(CHECK, plan(world_size=2, **waiting, optimizer_offload_fraction=0.9)), "do not fit")
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 2 * on_host - 1)
    only(
        found(CHECK, plan(world_size=2, **waiting)),
        "does not fit into the memory of the host",
        "each of 2 ranks",
        "--optimizer-offload-fraction",
    )
    monkeypatch.setattr(device, "cuda_is_available", lambda: False)  # nothing leaves a CPU
    monkeypatch.setattr(host, "available_memory_bytes", lambda: needed() - 1)
    only(found(CHECK, plan(optimizer_cpu_offload=True)), "do not fit into memory")


def test_what_another_check_says_is_not_said_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 0)
    assert found(CHECK, plan(world_size=3, tensor_model_parallel_size=2)) == []
    assert (
        found(CHECK, plan(world_size=2, tensor_model_parallel_size=2, pad_vocab_size_to=129)) == []
    )
