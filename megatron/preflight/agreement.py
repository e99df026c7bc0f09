"""Whether all ranks run the same thing: compared once groups exist, and again while training.

A rank with other flags or another version, or one whose counters drifted, trains another model; it
is named here, with its values beside those of the others.
"""

from collections.abc import Mapping

from megatron.data.corpus.sources import PAIR_ID
from megatron.errors import DataError, NumericsError
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import Group
from megatron.peers.differences import differences, launch_problem


def agree_on_launch(facts: Mapping[str, str], world: Group) -> None:
    """Compare the launch of every rank (versions, config fingerprint) over the world.

    Raises:
        ConfigError: on every rank, naming the facts that differ and the ranks that hold them.
    """
    problem = launch_problem(all_gather_object(dict(facts), world))
    if problem is not None:
        raise problem


def agree_on_data(sources: Mapping[str, str], world: Group) -> None:
    """Compare the contents of the data files (`data.corpus.sources`) over the world.

    A checksum file that some ranks lack is no difference: their corpora may be the same.

    Raises:
        DataError: on every rank, naming the files that differ and the ranks that hold which.
    """
    difference = _difference(sources, world, may_lack=PAIR_ID)
    if difference:
        raise DataError(
            "the ranks do not see the same data",
            found=difference,
            fix="copy the same files to every node, under the same names",
        )


def agree_on_state(state: Mapping[str, object], world: Group) -> None:
    """Compare the state that determines the next step (counters, loss scale) over the world.

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


def _difference(facts: Mapping[str, str], world: Group, *, may_lack: str | None = None) -> str:
    return differences(all_gather_object(dict(facts), world), may_lack=may_lack)
