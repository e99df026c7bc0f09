"""What the rank that schedules sends to the other ranks of its engine: one log, in one order.

All collectives of an engine follow from messages of this log, so every rank makes them in the same
order. The messages are sent over the group of the model's own ranks (SECURITY.md: between the ranks
of one job). The leader of an idle engine sends signs of life, long before a wait for one ends.
"""

import queue
import threading
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from megatron.errors import ConfigError
from megatron.mpu.collectives import all_gather_object, broadcast_object
from megatron.mpu.context import Group, ParallelContext
from megatron.scheduling.control.member import TaskKind
from megatron.scheduling.control.messages import Prepare
from megatron.scheduling.replay import RoundRecord

IDLE_ROUND_NS = 10_000_000_000  # between two messages of an engine that computes nothing


@dataclass(frozen=True, slots=True)
class EngineStep:
    """The next step of the scheduler."""

    record: RoundRecord


@dataclass(frozen=True, slots=True)
class RankTransition:
    """A part of a transition that all ranks make at this place of the log."""

    part: TaskKind
    prepare: Prepare


@dataclass(frozen=True, slots=True)
class IdleRound:
    """A sign of life of an engine that computes nothing."""


@dataclass(frozen=True, slots=True)
class EngineEnd:
    """The last message."""

    detail: str


RankMessage = EngineStep | RankTransition | IdleRound | EngineEnd
Value = TypeVar("Value")


class RoundLog(Protocol):
    """The leader's side of a log."""

    @property
    def has_followers(self) -> bool:
        """Whether other ranks read it."""

    def send(self, message: RankMessage) -> None:
        """Send a message; returns when the other ranks can have it."""


class LocalLog:
    """The log of an engine of one rank: nobody reads it."""

    has_followers = False

    def send(self, message: RankMessage) -> None:
        """Do nothing."""


class GroupLog:
    """A log over a process group, whose first rank leads.

    Args:
        group: the ranks of the engine; its timeout limits the wait for a message.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    @property
    def has_followers(self) -> bool:
        """Whether other ranks read it."""
        return self._group.size > 1

    @property
    def leads(self) -> bool:
        """Whether this rank writes it."""
        return self._group.is_first

    def agree(self, value: Value) -> Value:
        """Return the first rank's value on every rank."""
        return broadcast_object(value, self._group)

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value, in the order of ranks."""
        return all_gather_object(value, self._group)

    def send(self, message: RankMessage) -> None:
        """Send a message from the first rank."""
        broadcast_object(message, self._group)

    def receive(self) -> RankMessage:
        """Return the next message, on every other rank."""
        return cast("RankMessage", broadcast_object(None, self._group))


class AheadLog:
    """A log whose leader does not wait until the others have come to a step that it sends.

    A thread sends the messages in their order. Nothing else may use the group of the log between
    the first step and the next message of another kind, which is waited for.

    Args:
        log: over which they are sent.
    """

    has_followers = True

    def __init__(self, log: RoundLog) -> None:
        self._log = log
        self._messages: queue.Queue[RankMessage] = queue.Queue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def send(self, message: RankMessage) -> None:
        """Send a message.

        Raises:
            Exception: this message, or one before it, could not be sent.
        """
        self._messages.put(message)
        if not isinstance(message, EngineStep):
            self._messages.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            message = self._messages.get()
            try:
                if self._error is None:
                    self._log.send(message)
            except Exception as error:
                self._error = error
            self._messages.task_done()


def engine_group(ctx: ParallelContext) -> Group:
    """Return the ranks that compute every step of one engine together, to send objects."""
    group = ctx.whole_model
    return ctx.host_tp_cp if group.ranks == ctx.tp_cp.ranks else group


def check_idle_wait(timeout_minutes: float) -> None:
    """Check that ranks wait for each other longer than an idle engine is silent.

    Raises:
        ConfigError: they do not.
    """
    least_minutes = 3 * IDLE_ROUND_NS / 60e9
    if timeout_minutes < least_minutes:
        raise ConfigError(
            "ranks of an idle engine would give up waiting for each other",
            found=f"--distributed-timeout-minutes {timeout_minutes:g}; a sign of life every "
            f"{IDLE_ROUND_NS // 1_000_000_000} s",
            fix=f"use --distributed-timeout-minutes {least_minutes:g} or more",
        )
