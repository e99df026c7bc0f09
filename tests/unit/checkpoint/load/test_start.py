"""A run goes on where it was, or begins with the weights that its flags name."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.load.start import begins_in, flags_to_load, starts_fresh_if_empty
from megatron.config.checkpoint import CheckpointConfig, LoadFallback


def test_only_the_same_folder_starts_fresh(tmp_path: Path) -> None:
    assert starts_fresh_if_empty(str(tmp_path), f"{tmp_path}/.")
    assert not starts_fresh_if_empty(str(tmp_path), None)
    assert not starts_fresh_if_empty(str(tmp_path), str(tmp_path / "x"))


def test_addresses_are_compared_as_they_are_written() -> None:
    assert starts_fresh_if_empty("memory://box/run", "memory://box/run/")
    assert not starts_fresh_if_empty("memory://box/run", "memory://box/other")
    assert not starts_fresh_if_empty("memory://box/run", "box/run")


@pytest.mark.parametrize(
    ("load", "save", "pretrained", "folder"),
    [
        (None, None, None, None),
        (None, "empty", None, None),
        ("empty", "empty", None, None),
        ("empty", "other", None, "empty"),  # opening it says that there is nothing
        ("held", "held", None, "held"),
        (None, None, "weights", "weights"),
        ("empty", "empty", "weights", "weights"),
        ("empty", None, "weights", "weights"),
        ("held", "held", "weights", "held"),
        ("held", None, "weights", "held"),
    ],
)
def test_a_run_begins_with_its_own_checkpoint_or_with_pretrained_weights(
    tmp_path: Path, load: str | None, save: str | None, pretrained: str | None, folder: str | None
) -> None:
    (tmp_path / "held" / "iter_0000005").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    named = [None if name is None else str(tmp_path / name) for name in (load, save, pretrained)]
    expected = None if folder is None else str(tmp_path / folder)
    assert begins_in(*named) == expected


def test_pretrained_weights_are_those_of_another_run(tmp_path: Path) -> None:
    here = str(tmp_path / "run")
    flags: dict[str, Any] = {
        "load": here,
        "save": here,
        "load_fallback": LoadFallback.PREVIOUS,
        "load_except": ("output.*",),
    }
    given = CheckpointConfig(**flags, pretrained_checkpoint="weights")
    begun = CheckpointConfig(
        load="weights", save=here, finetune=True, load_except=flags["load_except"]
    )
    assert flags_to_load(given) == begun
    (tmp_path / "run" / "iter_0000005").mkdir(parents=True)
    resumed = CheckpointConfig(**(flags | {"load_except": ()}))
    assert flags_to_load(given) == resumed


def test_other_flags_are_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "iter_0000005").mkdir()
    plain = CheckpointConfig(load=str(tmp_path), finetune=True, load_only=("layers.*",))
    assert flags_to_load(plain) == plain
    assert flags_to_load(CheckpointConfig()) is None
    both = CheckpointConfig(
        load=str(tmp_path), finetune=True, load_only=("layers.*",), pretrained_checkpoint="p"
    )
    assert flags_to_load(both) == plain
