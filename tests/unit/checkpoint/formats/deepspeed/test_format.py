"""DeepSpeed's engine alone saves in DeepSpeed's layout; its universal layout is for tools."""

from pathlib import Path

from megatron.checkpoint.formats.deepspeed.format import DEEPSPEED, UNIVERSAL
from megatron.checkpoint.formats.format import PlannedRun
from tests.support.tiny import tiny_run
from tests.unit.checkpoint.formats.deepspeed.toy import write_folder


def test_it_needs_its_engine_a_folder_and_the_optimizers_state(tmp_path: Path) -> None:
    asked = {"checkpoint_format": "deepspeed", "save": str(tmp_path), "deepspeed": True}
    for flags, named in (
        ({}, ""),
        ({"deepspeed": False}, "with no --deepspeed"),
        ({"save_optim": False}, "with --no-save-optim"),
        ({"save": "memory://run"}, "with --save memory://run"),
    ):
        run = PlannedRun(tiny_run("nowhere", **{**asked, **flags}), lambda: True)
        refusal = DEEPSPEED.refuse_run(run)
        assert (refusal is not None) == bool(named)
        if refusal is not None:
            assert "DeepSpeed cannot write the checkpoints of this run" in str(refusal)
            assert named in str(refusal.found)


def test_the_two_are_told_apart(tmp_path: Path) -> None:
    write_folder(tmp_path, dp=1)
    assert DEEPSPEED.recognise(tmp_path)
    assert not UNIVERSAL.recognise(tmp_path)
    (tmp_path / "zero").mkdir()
    assert UNIVERSAL.recognise(tmp_path)
    assert (DEEPSPEED.folder_tracker, UNIVERSAL.folder_tracker) == ("latest", "latest_universal")
