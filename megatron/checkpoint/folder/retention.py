"""Which of a folder's checkpoints a newer one makes redundant. Pure.

Only intact checkpoints count as kept, so that damaged ones never displace good ones; the newest is
always kept. `run_folder` deletes.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Retention(NamedTuple):
    """What to keep: the newest `last` (None: everything), multiples of `every`, the `best`."""

    last: int | None = None
    every: int | None = None
    best: int | None = None


KEEP_ALL = Retention()


class FoundCheckpoint(NamedTuple):
    """One checkpoint in the folder; `loss` is the validation loss of its weights, if known."""

    iteration: int
    is_whole: bool
    loss: float | None = None


def redundant(found: Sequence[FoundCheckpoint], rule: Retention, *, newest: int) -> list[int]:
    """Return the iterations to delete, newest first, once that of `newest` has been verified.

    Nothing unless that one is whole; nothing after it (a run that was rolled back).
    """
    earlier = sorted((f for f in found if f.iteration <= newest), reverse=True)
    if rule.last is None or not earlier or not earlier[0].is_whole:
        return []
    if earlier[0].iteration != newest:
        return []
    intact = [f for f in earlier if f.is_whole]
    if len(intact) < rule.last:
        return []
    oldest_kept = intact[rule.last - 1].iteration
    kept = {f.iteration for f in earlier if f.iteration >= oldest_kept}
    if rule.every is not None:
        kept |= {f.iteration for f in earlier if f.iteration % rule.every == 0}
    if rule.best is not None:
        # Of equal losses the newer is better.
        ranked = sorted((f.loss, -f.iteration) for f in intact if f.loss is not None)
        kept |= {-iteration for _, iteration in ranked[: rule.best]}
    return [f.iteration for f in earlier if f.iteration not in kept]
