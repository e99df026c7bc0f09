"""Whether the checkpoint that a run is to continue from is there."""

from collections.abc import Iterator
from pathlib import Path

from megatron.checkpoint import storage
from megatron.errors import MegatronError
from megatron.preflight.run import RunPlan


def checkpoint_to_load_exists(plan: RunPlan) -> Iterator[MegatronError]:
    """A missing checkpoint is an error, unless this is the first start of a run that resumes."""
    flags = plan.config.checkpoint
    if flags.load is None:
        return
    if starts_fresh_if_empty(flags.load, flags.save) and storage.never_held_a_checkpoint(
        flags.load
    ):
        return
    storage.latest_iteration(flags.load)  # what it raises is the finding
    yield from ()


def starts_fresh_if_empty(load: str, save: str | None) -> bool:
    """Whether a run whose --load has never held a checkpoint may start from random weights."""
    return save is not None and Path(load).resolve() == Path(save).resolve()
