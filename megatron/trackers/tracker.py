"""The interface of a tracker, and what a run tells it.

All trackers get the same names of numbers. A library is imported when its tracker is opened, by the
one rank that writes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megatron.config.runtime import LoggingConfig
from megatron.config.trackers import TrackersConfig
from megatron.json_values import JsonObject
from megatron.progress import Progress


class Tracker(Protocol):
    """An open record of one run."""

    def log_scalars(self, values: Mapping[str, float], at: Progress) -> None:
        """Record numbers by name; may raise whatever the library raises."""

    def close(self) -> None:
        """Write what is not written yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run as its trackers know it.

    Attributes:
        name: equal in all trackers and at every start that continues the run; empty where only
            TensorBoard records it.
        configs: what the run was told (its flags, and DeepSpeed's JSON), by title, without secrets.
        first_iteration: of this start, counted from 1.
    """

    logging: LoggingConfig
    trackers: TrackersConfig
    name: str
    configs: Mapping[str, JsonObject]
    first_iteration: int


@dataclass(slots=True)
class RunName:
    """The name of this process's run in its trackers; empty until one is needed.

    Checkpoints keep it, so that a resumed run continues its records.
    """

    value: str = ""


class Service(NamedTuple):
    """One optional tracker.

    Attributes:
        title: what messages call it.
        field: of `TrackersConfig`, which asks for it if it is not empty.
        package: that has to be installed; also the name of our extra.
        secrets: environment variables that only the rank which writes may keep.
        open: begins or continues the record of a run.
        problem: says what is wrong with the key that its library found, if anything is, without
            the key; no network is needed for that.
    """

    title: str
    field: str
    package: str
    secrets: tuple[str, ...]
    open: Callable[[TrackedRun], Tracker]
    problem: Callable[[], str | None] = lambda: None
