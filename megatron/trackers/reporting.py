"""The trackers of a run: which are asked for, how they are opened, and what a failing one does.

A tracker never stops a run. One that fails, at its opening or later, is said once and dropped.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from megatron import log
from megatron.config.deepspeed.keys import value_at
from megatron.config.deepspeed.plan import user_json
from megatron.config.run import RunConfig
from megatron.config.trackers import TrackersConfig
from megatron.errors import ConfigError
from megatron.progress import Progress
from megatron.trackers import comet, mlflow, trackio, wandb
from megatron.trackers.redaction import redacted_failure
from megatron.trackers.tracker import Service, TrackedRun, Tracker

SERVICES: tuple[Service, ...] = (wandb.SERVICE, mlflow.SERVICE, comet.SERVICE, trackio.SERVICE)


# Those that DeepSpeed writes to from rank 0, by their block of its JSON.
_MONITORS = {"wandb": wandb.SERVICE, "comet": comet.SERVICE}


def services_of(flags: TrackersConfig) -> tuple[Service, ...]:
    """Return the services that the flags ask for."""
    return tuple(service for service in SERVICES if getattr(flags, service.field))


def writing_rank(flags: TrackersConfig, world_size: int) -> int:
    """Return the rank that writes to all trackers; by default the last, as in Megatron."""
    return world_size - 1 if flags.tracker_rank is None else flags.tracker_rank


def monitors_of(config: RunConfig) -> tuple[Service, ...]:
    """Return the services that DeepSpeed's JSON asks for, to which rank 0 writes.

    None where the file cannot be read: a check before training reports it.
    """
    if not config.engine.deepspeed:
        return ()
    try:
        user = user_json(config)
    except ConfigError:
        return ()
    return tuple(one for block, one in _MONITORS.items() if value_at(user, f"{block}.enabled"))


def services_on(config: RunConfig, rank: int, world_size: int) -> tuple[Service, ...]:
    """Return the services that a rank writes to, each once."""
    own = services_of(config.trackers) if rank == writing_rank(config.trackers, world_size) else ()
    return tuple(dict.fromkeys((*own, *(monitors_of(config) if rank == 0 else ()))))


def secrets_not_needed(config: RunConfig, rank: int, world_size: int) -> tuple[str, ...]:
    """Return the variables with keys of the services asked for that this rank does not write to."""
    here = services_on(config, rank, world_size)
    asked = dict.fromkeys((*services_of(config.trackers), *monitors_of(config)))
    return tuple(name for one in asked if one not in here for name in one.secrets)


class Trackers:
    """The open trackers of this rank; none on the ranks that do not write."""

    def __init__(self, opened: Mapping[str, Tracker] = MappingProxyType({})) -> None:
        self._opened = dict(opened)

    def log_scalars(self, values: Mapping[str, float], at: Progress) -> None:
        """Hand numbers to every tracker."""
        for title, tracker in tuple(self._opened.items()):
            with self._dropped_if_it_fails(title):
                tracker.log_scalars(values, at)

    def close(self) -> None:
        """Close every tracker."""
        while self._opened:
            title, tracker = self._opened.popitem()
            with self._dropped_if_it_fails(title):
                tracker.close()

    @contextmanager
    def _dropped_if_it_fails(self, title: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._opened.pop(title, None)
            _say_failure(title, error)


def open_trackers(run: TrackedRun) -> Trackers:
    """Open TensorBoard and the services that the flags ask for, on the rank that writes."""
    opened: dict[str, Tracker] = {}
    openers: dict[str, Callable[[TrackedRun], Tracker]] = {
        service.title: service.open for service in services_of(run.trackers)
    }
    if run.logging.tensorboard_dir is not None:
        from megatron.trackers.tensorboard import TensorBoard  # a second of imports, one rank only

        openers["TensorBoard"] = TensorBoard
    for title, opener in openers.items():
        try:
            opened[title] = opener(run)
        except Exception as error:
            _say_failure(title, error)
    return Trackers(opened)


def _say_failure(title: str, error: Exception) -> None:
    # As an error, so that the rank prints it that writes; the run goes on.
    words = redacted_failure(error)
    log.error(f"{title} records nothing from here on; the run continues without it: {words}")
