"""A checkpoint to go on from is there, or this is the first start of a run that resumes."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron.data.kinds.program_data import BERT_DATA, ict_data
from megatron.data.vision.image_maker import image_data
from megatron.errors import CheckpointError
from megatron.preflight.checkpoint import (
    best_checkpoints_can_be_told,
    checkpoint_format_can_hold_the_run,
    checkpoint_to_load_exists,
    local_checkpoints_have_holders,
    run_can_go_back_from_a_spike,
)
from tests.support.checkpoints.megatron_files import Shape, save_megatron, whole_model
from tests.unit.preflight.plans import found, only, plan


def test_nothing_to_load_and_a_first_start_are_fine(tmp_path: Path) -> None:
    here = str(tmp_path / "run")
    assert found(checkpoint_to_load_exists, plan()) == []
    assert found(checkpoint_to_load_exists, plan(save=here, load=here)) == []
    (tmp_path / "run").mkdir()
    assert found(checkpoint_to_load_exists, plan(save=here, load=f"{here}/../run")) == []


def test_fine_tuning_needs_weights() -> None:
    errors = found(checkpoint_to_load_exists, plan(finetune=True))
    only(errors, "fine-tuning needs weights to start from", "--finetune without --load")


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


def test_a_checkpoint_of_another_format_is_there(tmp_path: Path) -> None:
    directory = save_megatron(tmp_path, whole_model(Shape()), Shape())
    for load in (tmp_path, directory):
        assert found(checkpoint_to_load_exists, plan(load=str(load))) == []
    assert found(checkpoint_to_load_exists, plan(load=str(tmp_path), load_iteration=10)) == []
    errors = found(checkpoint_to_load_exists, plan(load=str(tmp_path), load_iteration=9))
    only(errors, "iteration 9 is not in the checkpoint folder")


@pytest.mark.parametrize("form", ["megatron", "deepspeed"])
def test_a_format_is_only_asked_for_where_it_can_hold_the_run(tmp_path: Path, form: str) -> None:
    check = checkpoint_format_can_hold_the_run
    flags: dict[str, Any] = {"save": "memory://bucket/run", "checkpoint_format": form}
    errors = found(check, plan(**flags))
    only(errors, f"--checkpoint-format {form} with", "--save memory://bucket/run")
    assert found(check, plan(checkpoint_format=form)) == [], "nothing is saved"
    assert found(check, plan(**flags | {"checkpoint_format": "sharded"})) == []
    fine = plan(**flags | {"save": str(tmp_path), "deepspeed": form == "deepspeed"})
    assert found(check, fine) == []
    assert found(check, dataclasses.replace(fine, reads=BERT_DATA)) == []


def test_stages_of_unequal_length_are_no_matter_but_to_megatrons_files(tmp_path: Path) -> None:
    stages = {"num_layers": 3, "pipeline_model_parallel_size": 2, "save": str(tmp_path)}
    check = checkpoint_format_can_hold_the_run
    assert found(check, plan(**stages, world_size=2)) == []
    errors = found(check, plan(**stages, checkpoint_format="megatron", world_size=2))
    only(errors, "Megatron's files cannot hold this run", "pipeline stages of unequal length")


@pytest.mark.parametrize("form", ["megatron", "deepspeed"])
def test_other_formats_are_not_written_beside_the_training(tmp_path: Path, form: str) -> None:
    flags = {"save": str(tmp_path), "checkpoint_format": form, "async_save": True}
    errors = found(checkpoint_format_can_hold_the_run, plan(**flags, deepspeed=form == "deepspeed"))
    only(
        errors,
        "only checkpoints of our own format are written beside the training",
        f"--checkpoint-format {form} with --async-save",
    )
    ours = plan(**flags | {"checkpoint_format": "sharded"})
    assert found(checkpoint_format_can_hold_the_run, ours) == []


def test_pretrained_weights_are_looked_for_while_there_is_no_checkpoint(tmp_path: Path) -> None:
    load, weights = str(tmp_path / "run"), str(tmp_path / "weights")
    flags = {"load": load, "pretrained_checkpoint": weights}
    (error,) = found(checkpoint_to_load_exists, plan(**flags))
    assert weights in str(error)
    (tmp_path / "weights" / "iter_0000005").mkdir(parents=True)
    (tmp_path / "weights" / "latest_checkpointed_iteration.txt").write_text("5")
    assert found(checkpoint_to_load_exists, plan(**flags)) == []
    assert found(checkpoint_to_load_exists, plan(pretrained_checkpoint=weights)) == []


def test_the_iteration_that_is_asked_for_has_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "iter_0000005").mkdir()
    here = str(tmp_path)
    run_plan = plan(load=here, load_iteration=4)
    only(found(checkpoint_to_load_exists, run_plan), "iteration 4 is not in", "there: 5")
    assert found(checkpoint_to_load_exists, plan(load=here, load_iteration=5)) == []
    previous = plan(load=here, load_iteration=9, load_fallback="previous")
    assert found(checkpoint_to_load_exists, previous) == []
    nothing_before = plan(load=here, load_iteration=2, load_fallback="previous")
    only(found(checkpoint_to_load_exists, nothing_before), "iteration 2 is not in")


@pytest.mark.parametrize("name", ["iter_0000005", "global_step5"])
def test_a_lost_tracker_is_left_to_the_fallback(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    here = str(tmp_path)
    assert found(checkpoint_to_load_exists, plan(load=here, load_fallback="previous")) == []
    (tmp_path / name).rmdir()
    only(found(checkpoint_to_load_exists, plan(load=here, load_fallback="previous")), "never held")


def test_the_best_checkpoints_need_losses_to_compare() -> None:
    keep = {"save": "s", "keep_last": 1, "keep_best": 2}
    good = {"save_interval": 20, "eval_interval": 10, "eval_iters": 1}
    assert found(best_checkpoints_can_be_told, plan()) == []
    assert found(best_checkpoints_can_be_told, plan(**keep, **good)) == []
    for missing in (
        {"eval_iters": 0},
        {"eval_interval": 0},
        {"save_interval": None},
        {"split": "9,0,1"},
    ):
        run_plan = plan(**keep, **{**good, **missing})
        only(found(best_checkpoints_can_be_told, run_plan), "cannot be determined", "--keep-best 2")
    run_plan = plan(**keep, **{**good, "save_interval": 15})
    only(found(best_checkpoints_can_be_told, run_plan), "is not known", "--save-interval 15")


def test_a_run_that_goes_back_finds_its_own_checkpoints(tmp_path: Path) -> None:
    check, here = run_can_go_back_from_a_spike, str(tmp_path / "run")
    rewinds: dict[str, Any] = {"loss_spike_factor": 3.0, "loss_spike_action": "rewind"}
    good = {"save": here, "load": here, "save_interval": 10}
    assert found(check, plan(**rewinds, **good)) == []
    assert found(check, plan(loss_spike_factor=3.0)) == []
    for bad in (
        {"load": None},
        {"save": None, "load": None},
        {"load": str(tmp_path / "other")},
        {"save_interval": None},
        {"finetune": True},
        {"save": "memory://run", "load": "memory://run"},
    ):
        errors = found(check, plan(**rewinds, **(good | bad)))
        only(
            errors, "has to find its own last checkpoint", "--loss-spike-action rewind with --save"
        )


def test_ranks_form_the_groups_that_hold_each_other_s_local_checkpoints(tmp_path: Path) -> None:
    here = str(tmp_path / "run")
    local: dict[str, Any] = {
        "save": here,
        "load": here,
        "non_persistent_save_interval": 5,
        "non_persistent_local_ckpt_dir": "/dev/shm/run",
    }
    copied = local | {"replication": True}
    assert found(local_checkpoints_have_holders, plan(world_size=3, **local)) == []
    fine = plan(world_size=8, **copied, replication_jump=4)
    assert found(local_checkpoints_have_holders, fine) == []
    errors = found(local_checkpoints_have_holders, plan(world_size=6, **copied, replication_jump=2))
    only(errors, "into equal groups", "6 ranks; --replication-jump 2")


def test_a_retriever_and_a_vit_are_not_saved_in_megatrons_layout(tmp_path: Path) -> None:
    check = checkpoint_format_can_hold_the_run
    given = plan(save=str(tmp_path), checkpoint_format="megatron")
    assert found(check, given) == []
    retriever = dataclasses.replace(given, reads=ict_data(given.config.retrieval))
    only(found(check, retriever), "none for two towers", "megatron of a retriever")
    vit = dataclasses.replace(given, reads=image_data(given.config.vision))
    only(found(check, vit), "none for patches of images", "megatron of a ViT")
