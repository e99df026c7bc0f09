"""A checkpoint to go on from is there, or this is the first start of a run that resumes."""

from pathlib import Path

from megatron.errors import CheckpointError
from megatron.preflight.checkpoint import checkpoint_to_load_exists, starts_fresh_if_empty
from tests.unit.preflight.plans import found, plan


def test_nothing_to_load_and_a_first_start_are_fine(tmp_path: Path) -> None:
    here = str(tmp_path / "run")
    assert found(checkpoint_to_load_exists, plan()) == []
    assert found(checkpoint_to_load_exists, plan(save=here, load=here)) == []
    (tmp_path / "run").mkdir()
    assert found(checkpoint_to_load_exists, plan(save=here, load=f"{here}/../run")) == []


def test_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    empty = str(tmp_path / "empty")
    for flags in ({"load": empty}, {"load": empty, "save": str(tmp_path / "other")}):
        errors = found(checkpoint_to_load_exists, plan(**flags))
        assert [type(error) for error in errors] == [CheckpointError]
        assert "empty" in str(errors[0])


def test_a_folder_that_lost_its_tracker_does_not_start_fresh(tmp_path: Path) -> None:
    (tmp_path / "iter_0000005").mkdir()
    here = str(tmp_path)
    errors = found(checkpoint_to_load_exists, plan(save=here, load=here))
    assert [type(error) for error in errors] == [CheckpointError]


def test_only_the_same_folder_starts_fresh(tmp_path: Path) -> None:
    assert starts_fresh_if_empty(str(tmp_path), f"{tmp_path}/.")
    assert not starts_fresh_if_empty(str(tmp_path), None)
    assert not starts_fresh_if_empty(str(tmp_path), str(tmp_path / "x"))
