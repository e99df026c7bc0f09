"""Services that record a run: installed on every rank, with a key on the rank that writes."""

import dataclasses
import json
from pathlib import Path

import pytest

from megatron.preflight import trackers as rules
from megatron.trackers import reporting
from megatron.trackers.reporting import secrets_not_needed
from megatron.trackers.wandb import SERVICE
from tests.unit.preflight.plans import found, only, plan


def test_the_rank_that_writes_is_one_of_the_run() -> None:
    check = rules.trackers_write_from_a_rank_of_the_run
    assert found(check, plan(world_size=2, tracker_rank=1)) == []
    only(
        found(check, plan(world_size=2, tracker_rank=2)),
        "the rank that writes to the trackers is not there",
        "--tracker-rank 2; 2 ranks",
        "use ranks from 0 to 1",
    )


def test_a_service_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    service = SERVICE._replace(package="no_such_package")
    monkeypatch.setattr(reporting, "SERVICES", (service,))
    asked = plan(wandb_project="p")
    only(
        found(rules.trackers_are_installed, asked),
        "the library of Weights & Biases is not installed",
        "--wandb-project, no package no_such_package",
        "pip install 'megatron-verified[no_such_package]', or leave --wandb-project out",
    )
    assert found(rules.trackers_have_their_keys, asked) == [], "the check above has said it"
    assert found(rules.trackers_are_installed, plan()) == []


def test_a_key_is_looked_for_on_the_rank_that_writes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_on: list[int] = []
    for rank in (0, 1):
        service = SERVICE._replace(problem=lambda rank=rank: asked_on.append(rank) or "no key")
        monkeypatch.setattr(reporting, "SERVICES", (service,))
        of_two = plan(world_size=2, wandb_project="p")
        launch = dataclasses.replace(of_two.launch, rank=rank, local_rank=rank)
        errors = found(rules.trackers_have_their_keys, dataclasses.replace(of_two, launch=launch))
    assert asked_on == [1]
    only(errors, "Weights & Biases has no valid key on rank 1", "no key", "set WANDB_API_KEY there")


def test_a_monitor_of_deepspeed_needs_its_library_and_a_key_on_rank_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    flags = {"deepspeed": True, "fp64": False, "deepspeed_config": str(path)}
    service = SERVICE._replace(problem=lambda: "no key", secrets=("KEY_OF_WANDB",))
    monkeypatch.setattr(reporting, "_MONITORS", {"wandb": service})
    for enabled in (True, False):
        path.write_text(json.dumps({"wandb": {"enabled": enabled}}))
        of_two = plan(world_size=2, **flags)
        other = dataclasses.replace(
            of_two, launch=dataclasses.replace(of_two.launch, rank=1, local_rank=1)
        )
        errors = found(rules.trackers_have_their_keys, of_two)
        assert found(rules.trackers_have_their_keys, other) == []
        secrets = [secrets_not_needed(of_two.config, rank, 2) for rank in (0, 1)]
        if enabled:
            only(errors, "Weights & Biases has no valid key on rank 0", "no key", "KEY_OF_WANDB")
            assert secrets == [(), ("KEY_OF_WANDB",)]
        else:
            assert (errors, secrets) == ([], [(), ()])
    path.write_text(json.dumps({"wandb": {"enabled": True}}))
    missing = service._replace(package="no_such_package")
    monkeypatch.setattr(reporting, "_MONITORS", {"wandb": missing})
    only(
        found(rules.trackers_are_installed, plan(**flags)),
        "the library of Weights & Biases is not installed",
        "Weights & Biases in --deepspeed_config, no package no_such_package",
    )
    path.write_text("{")
    assert found(rules.trackers_have_their_keys, plan(**flags)) == [], "another check reports it"
