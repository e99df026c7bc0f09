"""Where a run needed most memory: its high-water mark after each kind of work.

What a reader would get wrong: the mark of a process only rises, so work that stays below what came
before it has none.
"""

from collections.abc import Mapping, Sequence

from megatron import log
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import Group
from megatron.peers.activity import Activity


def memory_line(of_ranks: Sequence[Mapping[str, int]]) -> str:
    """Return the log line about the marks of all ranks: bytes by section, where they rose."""
    sections = dict.fromkeys(section for marks in of_ranks for section in marks)
    parts = []
    for section in sections:
        marks = [marks.get(section, 0) for marks in of_ranks]
        highest = max(marks)
        parts.append(f"{section} {highest / 2**30:.2f} (rank {marks.index(highest)})")
    return " | ".join(["memory high-water marks (GiB), where they rose", *parts])


def announce_memory(activity: Activity, world: Group) -> None:
    """Log the marks of the ranks that needed most; all ranks call this together."""
    of_ranks = all_gather_object(activity.memory_marks(), world)
    if any(of_ranks):
        log.info(memory_line(of_ranks))
