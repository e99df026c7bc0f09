"""Where the states of a run lie in a node's folder of local checkpoints. No torch here.

DIR/5f3a9c01d2e4b687/               one run, by the id in its --save folder
  rank-00003-of-00008/              what rank 3 holds, whoever wrote it here
    iter_0000120/
      rank.json                     a manifest of this state alone, with digests
      shard-00000-of-00001.safetensors, generators-00000.safetensors
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron.checkpoint.files.store import Place
from megatron.checkpoint.folder import run_folder

_OWNER = re.compile(r"rank-(\d{5})-of-(\d{5})")


class Lying(NamedTuple):
    """A state of rank `owner` of `world` that lies somewhere."""

    owner: int
    iteration: int
    world: int


def owner_name(owner: int, world: int) -> str:
    """Return the name of the folder of one rank's states."""
    return f"rank-{owner:05d}-of-{world:05d}"


def states_in(run: Path) -> Iterator[Lying]:
    """Yield the states that lie in the folder of a run."""
    for entry in run.iterdir() if run.is_dir() else ():
        match = _OWNER.fullmatch(entry.name)
        if match:
            for iteration in run_folder.iterations(entry):
                yield Lying(int(match[1]), iteration, int(match[2]))


def newest_iteration(root: Path, save: Place) -> int | None:
    """Return the iteration of the newest state of the run that saves in `save`; None: none."""
    if not (save / run_folder.RUN_ID).is_file():
        return None
    run = root / run_folder.run_id(save)
    return max((state.iteration for state in states_in(run)), default=None)
