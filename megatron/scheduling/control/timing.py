"""How long ranks of an engine wait for each other, in integer nanoseconds."""

from dataclasses import dataclass, fields

from megatron.errors import ConfigError
from megatron.scheduling.control.states import TransitionKind

_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTiming:
    """Times of the control plane.

    Attributes:
        heartbeat_ns: between two heartbeats of a member, and two tries of what is repeated.
        fence_ns: a member that has not heard the coordinator for so long admits nothing.
        lease_ns: a member that has not been heard for so long is removed. Longer than `fence_ns`,
            so that it has fenced itself before its requests are moved.
        pause_ns: for the preparation of a pause.
        prepare_ns: for that of any other transition.
    """

    heartbeat_ns: int = _SECOND // 2
    fence_ns: int = 2 * _SECOND
    lease_ns: int = 3 * _SECOND
    pause_ns: int = 10 * _SECOND
    prepare_ns: int = 60 * _SECOND

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"{field.name} of the control plane is not a number of nanoseconds",
                    found=f"{value!r}",
                    fix="use a positive integer",
                )
        if not self.heartbeat_ns < self.fence_ns < self.lease_ns:
            raise ConfigError(
                "a rank would be removed before it knows, or fenced between two heartbeats",
                found=f"heartbeat {self.heartbeat_ns} ns, fence {self.fence_ns} ns, lease "
                f"{self.lease_ns} ns",
                fix="let each be longer than the one before it",
            )

    def preparation_ns(self, kind: TransitionKind, remaining_ms: int) -> int:
        """Return how long a transition may be prepared; `remaining_ms` is what was asked, or 0."""
        if remaining_ms:
            return remaining_ms * 1_000_000
        return self.pause_ns if kind is TransitionKind.PAUSE else self.prepare_ns
