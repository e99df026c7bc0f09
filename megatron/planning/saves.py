"""Disk that the saves of a run need: bytes of one checkpoint, and how many there are at once."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron.checkpoint.folder.retention import FoundCheckpoint, Retention, redundant
from megatron.config.checkpoint import CheckpointConfig
from megatron.planning.rehearsal import RankPlan


class SaveCounts(NamedTuple):
    """Checkpoints that a run writes."""

    written: int
    kept: int  # at the end
    at_once: int  # the most on disk, with the one that is being written


def checkpoint_bytes(ranks: Sequence[RankPlan]) -> int:
    """Return the bytes of the tensors of one checkpoint, each stored once.

    Args:
        ranks: one of every pipeline stage.
    """
    saved: dict[str, int] = {}
    for rank in ranks:
        saved |= rank.saved
    return sum(saved.values())


def save_counts(flags: CheckpointConfig, total_iterations: int) -> SaveCounts:
    """Return the checkpoints of an uninterrupted run, of which none is damaged.

    With --keep-best the newest ones are taken to be the worst, so that the most are kept.
    """
    if flags.save is None:
        return SaveCounts(0, 0, 0)
    saved = {total_iterations, *filter(lambda n: n <= total_iterations, flags.extra_save_iters)}
    if flags.save_interval:
        saved |= set(range(flags.save_interval, total_iterations + 1, flags.save_interval))
    rule = Retention(flags.keep_last, flags.keep_every, flags.keep_best)
    if rule.last is None:
        return SaveCounts(len(saved), len(saved), len(saved))
    there: list[FoundCheckpoint] = []
    at_once = 0
    for iteration in sorted(saved):
        # Older ones are removed once the new one is in place.
        there.append(FoundCheckpoint(iteration, is_whole=True, loss=float(iteration)))
        at_once = max(at_once, len(there))
        gone = set(redundant(there, rule, newest=iteration))
        there = [one for one in there if one.iteration not in gone]
    return SaveCounts(len(saved), len(there), at_once)
