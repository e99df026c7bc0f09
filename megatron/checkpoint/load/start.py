"""What a run begins with, by its flags and by what lies in its folders.

That is its own newest checkpoint in --load, the weights in --pretrained-checkpoint, or random
weights.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.files.store import place
from megatron.checkpoint.folder.run_folder import never_held_a_checkpoint
from megatron.config.checkpoint import CheckpointConfig


def starts_fresh_if_empty(load: str, save: str | None) -> bool:
    """Return whether a run whose --load is empty may start from random weights.

    Empty means that the folder has never held a checkpoint.
    """
    if save is None:
        return False
    load_place, save_place = place(load), place(save)
    if isinstance(load_place, Path) and isinstance(save_place, Path):
        return load_place.resolve() == save_place.resolve()
    return load_place == save_place


def begins_in(load: str | None, save: str | None, pretrained: str | None) -> str | None:
    """Return the folder that a run begins in; None: it begins with random weights.

    A `load` that is to hold a checkpoint is returned even if there is none: opening it says so.
    """
    if load is None:
        return pretrained
    may_be_empty = pretrained is not None or starts_fresh_if_empty(load, save)
    return pretrained if may_be_empty and never_held_a_checkpoint(load) else load


def flags_to_load(flags: CheckpointConfig) -> CheckpointConfig | None:
    """Return the flags of the load that a run begins with; None: random weights.

    Pretrained weights are loaded as with --finetune. Where a run goes on that began with some of
    them, patterns of --load-only and --load-except have had their effect.
    """
    folder = begins_in(flags.load, flags.save, flags.pretrained_checkpoint)
    if folder is None or flags.pretrained_checkpoint is None:
        return None if folder is None else flags
    changed: dict[str, Any] = {"load": folder, "pretrained_checkpoint": None}
    if folder != flags.load:
        changed |= {"finetune": True, "load_iteration": None, "load_fallback": None}
    elif not flags.finetune:
        changed |= {"load_only": (), "load_except": ()}
    return replace(flags, **changed)
