"""Where a fine-tuning begins, and how long it is."""

from pathlib import Path

import pytest

from megatron.config.checkpoint import CheckpointConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.launch import Launch
from tasks.finetune.start import (
    PRETRAINED,
    Start,
    StartKind,
    best_to_load,
    finetuning_config,
    last_of,
    last_to_save,
    start_of,
)
from tests.support.tiny import tiny_run


def start(*, pretrained: str | None = None, epochs: int = 1, **flags: object) -> Start:
    checkpoint = CheckpointConfig(**flags, pretrained_checkpoint=pretrained)  # type: ignore[arg-type]
    return start_of(checkpoint, epochs=epochs)


def interrupted(folder: Path) -> str:
    """A folder of --save in which a run was interrupted."""
    (folder / "last" / "iter_0000003").mkdir(parents=True)
    return str(folder)


def test_what_is_loaded_follows_from_flags_and_folders(tmp_path: Path) -> None:
    save, fresh = interrupted(tmp_path / "save"), str(tmp_path / "fresh")
    assert start(pretrained="p") == (StartKind.PRETRAINED, "p", ())
    assert start(pretrained="p", save=save) == (StartKind.PRETRAINED, "p", ())
    assert start(load="x") == start(load="x", save=save) == (StartKind.WEIGHTS, "x", ())
    assert start(load=save, save=save) == (StartKind.RESUMED, f"{save}/last", ())
    assert start(load=save, save=f"{save}/", pretrained="p").kind is StartKind.RESUMED
    assert start(load=fresh, save=fresh, pretrained="p") == (StartKind.PRETRAINED, "p", ())
    assert start(load=save, save=save, finetune=True) == (StartKind.WEIGHTS, save, ())


def test_a_judge_takes_a_whole_model(tmp_path: Path) -> None:
    save = interrupted(tmp_path)
    assert start(epochs=0, load=save, save=save) == (StartKind.WEIGHTS, save, ())
    assert start(epochs=0, pretrained="p") == (StartKind.WEIGHTS, "p", ())  # as in Megatron


def test_there_is_one_model_to_begin_with(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begins with a model that was trained"):
        start()
    with pytest.raises(ConfigError, match="two models are given to begin with"):
        start(load="x", pretrained="p")
    with pytest.raises(CheckpointError, match="no interrupted fine-tuning to go on with"):
        start(load=str(tmp_path), save=str(tmp_path))


def test_the_length_is_that_of_the_epochs_on_as_many_replicas_as_there_are() -> None:
    config = tiny_run("nowhere", micro_batch_size=2, global_batch_size=None, eval_iters=100)
    begin = Start(StartKind.PRETRAINED, "p", ("pooler.*",))
    for ranks, batches in ((1, 6), (2, 3)):  # of 11 examples
        made = finetuning_config(
            config, begin, launch=Launch(world_size=ranks), epochs=3, examples=11
        )
        assert made.training.train_iters == 3 * batches
        assert made.checkpoint.load_only == PRETRAINED
        assert made.checkpoint.load_except == ("pooler.*",)
        assert made.checkpoint.finetune
        assert not made.training.eval_only
    judged = finetuning_config(
        config, Start(StartKind.WEIGHTS, "x"), launch=Launch(), epochs=0, examples=0
    )
    assert (judged.training.train_iters, judged.checkpoint.load) == (1, "x")
    assert not judged.checkpoint.load_only
    assert judged.training.eval_only


def test_going_on_loads_all_and_saves_in_two_places() -> None:
    config = tiny_run("nowhere", save="s/", keep_last=4)
    begin = Start(StartKind.RESUMED, last_of("s/"), ("pooler.*",))
    made = finetuning_config(config, begin, launch=Launch(), epochs=1, examples=4)
    assert (made.checkpoint.load, made.checkpoint.finetune) == ("s/last", False)
    assert not made.checkpoint.load_except
    assert (best_to_load(made).checkpoint.load, best_to_load(made).checkpoint.finetune) == (
        "s/",
        True,
    )
    assert (last_to_save(made).checkpoint.save, last_to_save(made).checkpoint.keep_last) == (
        "s/last",
        1,
    )


def test_finetune_alone_begins_with_the_pretrained_model() -> None:
    begun = start(finetune=True, pretrained="bert")
    assert (begun.kind, begun.folder) == (StartKind.PRETRAINED, "bert")
