"""Who keeps a copy of whose local checkpoint, and which one a run goes on from. Pure arithmetic.

Ranks that see one folder are on one node here, whatever its host is called. A step of a transfer is
a set of messages in which each rank sends at most one copy and receives at most one.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from megatron.errors import ConfigError


class CopyKey(NamedTuple):
    """The state of rank `owner` at an iteration; `save` is the same for all ranks of one save."""

    iteration: int
    save: str
    owner: int


class Transfer(NamedTuple):
    """The copy of rank `owner` goes from one rank to another one, which may be the owner."""

    owner: int
    source: int
    target: int


class Recovery(NamedTuple):
    """The newest save of which every rank's state is there, and what has to be sent before."""

    iteration: int
    save: str
    steps: tuple[tuple[Transfer, ...], ...]


def holders(world: int, jump: int, factor: int) -> list[tuple[int, ...]]:
    """Return for each rank who holds its state, itself first: every `jump`-th of its block.

    A block is `jump * factor` ranks, as in Megatron-LM, so that holders hold each other's state.

    Raises:
        ConfigError: the world is not a whole number of blocks.
    """
    block = jump * factor
    if world % block:
        raise ConfigError(
            "ranks cannot be put into equal groups that hold each other's local checkpoints",
            found=f"{world} ranks; --replication-jump {jump} times --replication-factor {factor} "
            f"is {block}",
            fix="choose them so that their product divides the number of ranks; the jump is "
            "usually the number of ranks of a node",
        )
    found = []
    for rank in range(world):
        start, at = rank // block * block + rank % jump, rank % block // jump
        found.append(tuple(start + (at + k) % factor * jump for k in range(factor)))
    return found


def replication(holders_of: Sequence[Sequence[int]]) -> list[tuple[Transfer, ...]]:
    """Return the steps in which every rank sends its state to the others that hold it."""
    factor = len(holders_of[0])
    return [
        tuple(Transfer(rank, rank, each[k]) for rank, each in enumerate(holders_of))
        for k in range(1, factor)
    ]


def newest_everywhere(
    intact: Sequence[Set[CopyKey]], folders: Sequence[int], holders_of: Sequence[Sequence[int]]
) -> Recovery | None:
    """Return how a run gets to the newest save of which every rank's state is there.

    Args:
        intact: by rank, the copies in its folder that it found intact; ranks of one folder may
            divide the work of looking between them.
        folders: by rank, a number that ranks of one folder share.
        holders_of: by rank, who has to hold its state before the run goes on, itself first.
    """
    at: dict[CopyKey, dict[int, int]] = defaultdict(dict)  # folder: the first rank that saw it
    for rank, keys in enumerate(intact):
        for key in keys:
            at[key].setdefault(folders[rank], rank)
    world = len(intact)
    for iteration, save in sorted({key[:2] for key in at}, reverse=True):
        wanted = [CopyKey(iteration, save, owner) for owner in range(world)]
        if all(key in at for key in wanted):
            lost = [
                (key, holder)
                for key in wanted
                for holder in holders_of[key.owner]
                if folders[holder] not in at[key]
            ]
            return Recovery(iteration, save, tuple(_steps(_from_the_idle(lost, at))))
    return None


def _from_the_idle(
    lost: Iterable[tuple[CopyKey, int]], at: dict[CopyKey, dict[int, int]]
) -> Iterator[Transfer]:
    """Yield a transfer for each copy that a rank has lost, from whoever sends the least so far."""
    sends: dict[int, int] = defaultdict(int)
    for key, target in lost:
        source = min(at[key].values(), key=lambda rank: (sends[rank], rank))
        sends[source] += 1
        yield Transfer(key.owner, source, target)


def _steps(transfers: Iterable[Transfer]) -> list[tuple[Transfer, ...]]:
    """Put each transfer into the first step in which neither end is taken."""
    steps: list[list[Transfer]] = []
    for one in transfers:
        free = (
            step
            for step in steps
            if all(other.source != one.source and other.target != one.target for other in step)
        )
        step = next(free, None)
        if step is None:
            steps.append([one])
        else:
            step.append(one)
    return [tuple(step) for step in steps]
