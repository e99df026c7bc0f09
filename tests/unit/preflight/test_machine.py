"""Limits of the machine are reported before anything runs on it."""

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron import device
from megatron.preflight import machine
from megatron.preflight.run import Check
from tests.unit.preflight.plans import found, only, plan


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(device, "cuda_is_available", lambda: count > 0)
    monkeypatch.setattr(device, "device_count", lambda: count)


@pytest.mark.parametrize(
    "check",
    [
        machine.software_is_new_enough,
        machine.backend_follows_device,
        machine.save_folder_can_be_written,
    ],
)
def test_a_good_plan_passes(check: Check, tmp_path: Path) -> None:
    assert found(check, plan(save=str(tmp_path / "run"))) == []


def test_old_software_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    only(found(machine.software_is_new_enough, plan()), "torch 2.9.1+cpu", "torch 2.10 or newer")
    monkeypatch.setattr(torch, "__version__", "3.0.0a0+git")
    assert found(machine.software_is_new_enough, plan()) == []
    monkeypatch.setattr(machine, "OLDEST_PYTHON", (99, 0))
    only(found(machine.software_is_new_enough, plan()), "Python 99.0 or newer")


def test_cuda_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)
    check = machine.backend_follows_device
    assert found(check, plan(device="auto")) == []
    only(found(check, plan(device="cuda")), "--device cuda", "--device cpu")
    only(
        found(check, plan(device="auto", distributed_backend="nccl")),
        "--distributed-backend nccl",
        "--distributed-backend gloo",
    )


def test_passes_that_are_compared_are_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    check = machine.repeated_passes_are_deterministic
    with_gpus(monkeypatch, 1)
    only(found(check, plan(device="auto", rerun_check_interval=9)), "9 on CUDA", "--deterministic")
    for flags in ({"device": "cpu"}, {"device": "auto", "deterministic_mode": True}):
        assert found(check, plan(rerun_check_interval=9, **flags)) == []
    assert found(check, plan(device="auto")) == []
    with_gpus(monkeypatch, 0)
    assert found(check, plan(device="auto", rerun_check_interval=9)) == []


def test_backends_and_counts_follow_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    check = machine.backend_follows_device
    for flags in ({"device": "cuda"}, {"device": "auto", "distributed_backend": "nccl"}):
        assert found(check, plan(world_size=2, **flags)) == []
    assert found(check, plan(world_size=8, distributed_backend="gloo")) == []  # on the CPU
    only(found(check, plan(device="auto", distributed_backend="gloo")), "--device cpu")
    crowded = plan(world_size=3, device="cuda")
    only(found(check, crowded), "3 ranks, 2 devices")
    # Each of the three sees a device that is its own.
    own = dataclasses.replace(crowded.launch, has_own_device=True)
    assert found(check, dataclasses.replace(crowded, launch=own)) == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bad = plan(save=str(tmp_path / "file" / "run"))
    only(found(machine.save_folder_can_be_written, bad), "file")


def test_a_secret_in_a_flag_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "f4ke-key")
    assert found(machine.flags_hold_no_secrets, plan()) == []
    errors = found(machine.flags_hold_no_secrets, plan(wandb_project="f4ke-key"))
    only(errors, "--wandb-project holds the value of the variable WANDB_API_KEY", "leave it out")
    assert "f4ke-key" not in str(errors[0])
    only(found(machine.flags_hold_no_secrets, plan("a/f4ke-key/c")), "--data-path holds")
