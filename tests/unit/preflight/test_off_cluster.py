"""Checks of a launch on a machine that is not of its cluster: which can run, and why not others."""

from pathlib import Path

import pytest

from megatron.preflight import checkpoint, data, machine
from megatron.preflight.checks import CHECKS, LAYOUT_CHECKS
from megatron.preflight.off_cluster import checks_here, local_folder
from megatron.preflight.run import collect_findings
from tests.support.tiny import write_tiny_corpus
from tests.unit.preflight.plans import plan

# They answer for the node that they run on, whatever the flags are.
OF_A_NODE = {
    "software_is_new_enough",
    "backend_follows_device",
    "device_multiplies_fp8",
    "deepspeed_has_the_precision",
    "deepspeed_is_installed",
    "training_fits_in_memory",
    "compilers_are_installed",
    "trackers_are_installed",
    "trackers_have_their_keys",
}
OF_CORPORA = {
    data.corpora_open_and_are_whole,
    data.corpora_fit_the_tokenizer,
    data.splits_hold_enough_samples,
}


def test_every_check_is_run_or_has_a_reason(tmp_path: Path) -> None:
    run = str(tmp_path)
    here = checks_here(plan(write_tiny_corpus(tmp_path), save=run, load=run))
    assert set(here.not_run) == OF_A_NODE
    assert len(here.runnable) + len(here.not_run) == len(CHECKS)
    assert all(here.not_run.values())
    assert set(LAYOUT_CHECKS) < set(here.runnable)


def test_files_that_are_not_here_are_not_looked_into(tmp_path: Path) -> None:
    folder = str(tmp_path / "elsewhere")
    away = plan("nowhere", save=folder, load=folder)
    here = checks_here(away)
    checks = {*OF_CORPORA, machine.save_folder_can_be_written, checkpoint.checkpoint_to_load_exists}
    assert set(here.not_run) == OF_A_NODE | {check.__name__ for check in checks}
    assert here.not_run["corpora_open_and_are_whole"].endswith("do not exist here: nowhere")
    assert f"--save {folder}" in here.not_run["save_folder_can_be_written"]
    assert f"--load {folder}" in here.not_run["checkpoint_to_load_exists"]
    assert collect_findings(away, here.runnable) == []
    assert not Path(folder).exists()


def test_what_is_here_is_looked_into(tmp_path: Path) -> None:
    prefix = write_tiny_corpus(tmp_path)
    with open(f"{prefix}.bin", "ab") as tokens:
        tokens.write(b"\0\0")
    damaged = plan(prefix, load=str(tmp_path))
    findings = collect_findings(damaged, checks_here(damaged).runnable)
    assert [one.check for one in findings] == [
        "corpora_open_and_are_whole",
        "checkpoint_to_load_exists",
    ]


def test_flags_that_cannot_be_read_are_reported_by_the_checks() -> None:
    odd = plan(data_path=("1", "a", "2"))
    findings = collect_findings(odd, checks_here(odd).runnable)
    assert "corpora_open_and_are_whole" in [one.check for one in findings]


@pytest.mark.parametrize("folder", [None, "s3://bucket/run", "nowhere", "no-such-scheme://x/y"])
def test_addresses_are_on_no_machine(folder: str | None) -> None:
    assert local_folder(folder) is None
