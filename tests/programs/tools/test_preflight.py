"""`tools/preflight.py` from the flags of a launch to its report, and to the error that ends it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, MegatronError, PreflightError
from megatron.planning.saves import SaveCounts
from megatron.preflight.checks import CHECKS
from tests.programs.tools.test_plan import FLAGS, HARDWARE
from tests.support.tiny import write_tiny_corpus
from tools.plan import main as plan_main
from tools.planning.report import Disk
from tools.preflight import _retention_that_fits, main

WORLD = ("--world-size", "8", *FLAGS, "--num-layers", "2", "--global-batch-size", "4")
FREE = 1_000_000  # bytes of a disk


def preflight(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    main([*WORLD, "--json", *flags])
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def ended(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[dict[str, Any], MegatronError]:
    """The report, and the error after it."""
    with pytest.raises(MegatronError) as raised:
        main([*WORLD, "--json", *flags])
    return json.loads(capsys.readouterr().out), raised.value


def test_a_launch_without_problems_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, run = write_tiny_corpus(tmp_path), tmp_path / "run"
    run.mkdir()
    saves = ("--save", str(run), "--save-interval", "1", "--async-save", "--eval-iters", "0")
    time = ("--mfu", "0.5", "--peak-tflops", "100", "--memory-gib", "1")
    main([*WORLD, "--data-path", prefix, *saves, *time, "--train-iters", "2", "--split", "1"])
    text = capsys.readouterr().out
    assert f"checks: {len(CHECKS) - text.count('not run here: ')} run, 0 problems" in text
    assert "not run here: backend_follows_device: it asks for the devices of a node" in text
    assert "counted FLOPs of all ranks: 100.0000%" in text  # the tables of tools/plan.py
    assert "at the peak of a rank fits into --memory-gib 1" in text
    assert "host memory of a node of 8 ranks" in text
    assert "the copy of --async-save" in text
    assert "time at an MFU of 50.00%" in text
    assert "days for 2 iterations, 8 samples, 128 tokens" in text
    assert "disk: 2 saves of 0.00 GiB; at most 2 there at once" in text
    assert f"{prefix}: 100.0000%, 8 samples of " in text
    assert " documents: 0." in text


def test_the_plan_in_a_report_is_that_of_the_planner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hardware = tmp_path / "hardware.json"
    hardware.write_text(json.dumps(HARDWARE))
    given = ("--hardware", str(hardware), "--train-iters", "10")
    found = preflight(capsys, *given)
    plan_main([*WORLD, "--json", *given])
    assert found["plan"] == json.loads(capsys.readouterr().out)
    seconds = found["plan"]["seconds"]["total"]
    assert found["seconds"] == {"step": seconds, "run": pytest.approx(10 * seconds)}
    assert found["peak_bytes"] == max(rank["bytes"]["peak"] for rank in found["plan"]["ranks"])
    assert found["ranks_per_node"] == 8
    assert found["problems"] == found["tried_to_fit"] == []
    assert found["checks_not_run"]["corpora_open_and_are_whole"].endswith("here: nowhere")
    (corpus,) = found["corpora"]
    assert (corpus["prefix"], corpus["samples"], corpus["tokens"]) == ("nowhere", 40, None)


def test_chosen_ranks_are_planned_and_saves_are_of_all_stages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, every = (
        preflight(capsys, *chosen, "--save", "not-here", "--mfu", "0.4", "--peak-tflops", "100")
        for chosen in (("--ranks", "3"), ())
    )
    assert [rank["rank"] for rank in one["plan"]["ranks"]] == [3]
    assert one["disk"] == every["disk"]
    assert one["disk"]["checkpoint_bytes"] > 0
    assert one["disk"]["free_bytes"] is None
    flops = one["plan"]["flops_by_formula"]
    assert one["seconds"]["step"] == pytest.approx(flops / (0.4 * 100e12 * 8))
    assert one["steps"]["tokens"] == 4 * 16


def test_what_does_not_fit_ends_with_the_flag_that_makes_it_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--recompute-granularity", "selective", "--micro-batch-size", "2")
    peak = preflight(capsys, *flags)["peak_bytes"]
    found, error = ended(capsys, *flags, "--memory-gib", str((peak - 1) / 2**30))
    (problem,) = found["problems"]
    assert problem["check"] == "a_step_fits_in_memory"
    last = found["tried_to_fit"][-1]
    assert last["fits"]
    assert last["peak_bytes"] < peak
    assert problem["fix"].startswith(f"add {' '.join(last['flags'])}: then ")
    assert " ".join(last["flags"]) in str(error)
    assert preflight(capsys, *flags, *last["flags"])["peak_bytes"] == last["peak_bytes"]


def test_where_nothing_fits_the_error_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    found, error = ended(capsys, "--memory-gib", "1e-6")
    assert not any(one["fits"] for one in found["tried_to_fit"])
    assert "no flags that were tried are enough" in str(error)


def test_all_problems_are_in_the_report_and_in_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_tiny_corpus(tmp_path, documents=2)
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=FREE))
    saves = ("--save", str(tmp_path), "--save-interval", "1", "--train-iters", "40")
    found, error = ended(capsys, "--data-path", prefix, "--split", "1", *saves)
    names = [one["check"] for one in found["problems"]]
    assert names == ["splits_hold_enough_samples", "saves_fit_on_disk"]
    assert all(name in str(error) for name in names)
    disk = found["disk"]
    assert disk["needed_bytes"] == 40 * disk["checkpoint_bytes"]
    kept = FREE // disk["checkpoint_bytes"] - 1
    assert kept >= 1
    assert found["problems"][1]["fix"].startswith(f"use --keep-last {kept} alone")
    enough = ("--keep-last", str(kept), "--data-path", "nowhere")
    assert preflight(capsys, *saves, *enough)["problems"] == []


def test_less_space_than_two_checkpoints_cannot_be_kept_within() -> None:
    disk = Disk(SaveCounts(9, 9, 9), checkpoint=2**30, free=2**31 - 1)
    assert (
        _retention_that_fits(disk) == "free some space: 2.00 GiB hold one checkpoint and the next"
    )
    assert _retention_that_fits(disk._replace(free=2**31)).startswith("use --keep-last 1 alone")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--optimizer-cpu-offload",), "--optimizer-cpu-offload"),
        (("--optimizer", "sgd"), "--optimizer sgd"),
    ],
)
def test_a_launch_that_is_not_rehearsed_has_a_report(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], reason: str
) -> None:
    found = preflight(capsys, *flags)
    assert found["plan"] is None
    assert reason in found["not_planned"]
    assert found["steps"]["samples"] == 4
    waits = "--optimizer-cpu-offload" in flags
    assert bool(found["host_bytes_of_a_node"]) == waits
    main([*WORLD, *flags])
    assert "no rank was rehearsed: a plan does not support" in capsys.readouterr().out


def test_made_up_data_are_named_so(capsys: pytest.CaptureFixture[str]) -> None:
    at = FLAGS.index("--data-path")
    main(["--world-size", "16", *FLAGS[:at], *FLAGS[at + 2 :], "--mock-data"])
    assert "data: made up, 16 samples (--mock-data)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        (["--world-size", "6"], PreflightError, ["6 ranks", "start a multiple of 4 ranks"]),
        (["--mfu", "1.5", "--peak-tflops", "1"], ConfigError, ["--mfu 1.5", "share of the peak"]),
        (["--mfu", "0.4"], ConfigError, ["no --peak-tflops and no --hardware"]),
        (["--memory-gib", "-1"], ConfigError, ["--memory-gib -1.0"]),
        (["--ranks-per-node", "0"], ConfigError, ["--ranks-per-node 0"]),
        (["--ranks", "8"], ConfigError, ["rank 8 of 8 ranks"]),
        (
            ["--num-attention-heads", "5", "--no-such-flag"],
            PreflightError,
            ["--no-such-flag", "--num-attention-heads 5"],
        ),
    ],
)
def test_what_cannot_be_looked_at_is_refused(
    flags: list[str], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as raised:
        main([*WORLD, *flags])
    assert all(word in str(raised.value) for word in words)
