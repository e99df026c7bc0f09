"""Whether all ranks run the same thing: compared once groups exist, and again while training.

A rank with other flags or another version, or one whose counters drifted, trains another model; it
is named here, with its values beside those of the others.
"""

from collections.abc import Mapping

from megatron.errors import ConfigError, NumericsError
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import Group


def agree_on_launch(facts: Mapping[str, str], world: Group) -> None:
    """Compare what every rank says of itself (versions, config fingerprint) over the world.

    Raises:
        ConfigError: on every rank, naming the facts that differ and the ranks that hold them.
    """
    difference = _difference(facts, world)
    if difference:
        raise ConfigError(
            "the ranks do not run the same thing",
            found=difference,
            fix="start every rank with the same flags, code, Python and torch",
        )


def agree_on_state(state: Mapping[str, object], world: Group) -> None:
    """Compare the state that decides what happens next (counters, loss scale) over the world.

    Raises:
        NumericsError: on every rank, naming the values that differ and the ranks that hold them.
    """
    difference = _difference({name: repr(value) for name, value in state.items()}, world)
    if difference:
        raise NumericsError(
            "the ranks are no longer in lockstep",
            found=difference,
            fix="resume from the last checkpoint; if it happens again, suspect the node of the "
            "rank that stands alone",
        )


def _difference(facts: Mapping[str, str], world: Group) -> str:
    """What differs, as text: each value with the ranks that hold it; empty when all agree."""
    told: list[Mapping[str, str]] = all_gather_object(dict(facts), world)
    lines = []
    for name in sorted({name for one in told for name in one}):
        holders: dict[str, list[int]] = {}
        for rank, one in enumerate(told):
            holders.setdefault(one.get(name, "(nothing)"), []).append(rank)
        if len(holders) > 1:
            values = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in holders.items())
            lines.append(f"{name}: {values}")
    return "; ".join(lines)


def _ranks(ranks: list[int]) -> str:
    if len(ranks) <= 4:
        return "rank " + ", ".join(map(str, ranks))
    return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]}, ... {ranks[-1]})"
