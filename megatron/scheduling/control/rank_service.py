"""A member with its times: it joins, sends heartbeats, and fences itself when it hears nothing.

Bytes and the time come in, bytes and tasks of the engine go out.
"""

from typing import NamedTuple

from megatron.scheduling.control.member import (
    EngineTask,
    JoinRequest,
    LeaseEnded,
    MemberEvent,
    MemberState,
    take_part,
)
from megatron.scheduling.control.messages import (
    Answer,
    Decide,
    Dismissed,
    Heartbeat,
    Lease,
    Message,
    MessageError,
    Prepare,
    RequestAbort,
    RequestStart,
    Welcome,
    decode_message,
    encode_message,
)
from megatron.scheduling.control.timing import ControlTiming


class EngineLoad(NamedTuple):
    """What a heartbeat tells of the engine of a rank."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0


class RankOutput(NamedTuple):
    """What follows from an event: bytes for the coordinator, tasks and requests of the engine."""

    data: tuple[bytes, ...] = ()
    tasks: tuple[EngineTask, ...] = ()
    requests: tuple[RequestStart | RequestAbort, ...] = ()


class RankService:
    """One rank.

    Args:
        rank: its number.
        incarnation: larger than that of any process before it that had this rank.
        timing: how long is waited; as the coordinator has it.

    Attributes:
        timing: how long is waited.
        refused: messages that were none.
    """

    def __init__(self, rank: int, incarnation: int, timing: ControlTiming) -> None:
        self.state = MemberState(rank, incarnation)
        self.refused = 0
        self.timing = timing
        self._heard_ns: int | None = None
        self._spoken_ns: int | None = None

    def receive(self, data: bytes, now_ns: int) -> RankOutput:
        """Take bytes of the coordinator."""
        try:
            message = decode_message(data)
        except MessageError:
            self.refused += 1
            return RankOutput()
        match message:
            case Welcome() | Dismissed() | Prepare() | Decide() | Lease():
                self._heard_ns = now_ns
                return self.take(message)
            case RequestStart() | RequestAbort():
                self._heard_ns = now_ns
                is_own = message.incarnation == self.state.incarnation
                output = self.take(message)
                return output._replace(requests=(message,) * is_own)
            case Answer():  # of something that the coordinator refused
                return RankOutput()
        self.refused += 1
        return RankOutput()

    def take(self, event: MemberEvent) -> RankOutput:
        """Take an event of the engine, such as that a transition is prepared."""
        self.state, messages, tasks = take_part(self.state, event)
        return RankOutput(tuple(map(encode_message, messages)), tasks)

    def tick(self, now_ns: int, load: EngineLoad = EngineLoad()) -> RankOutput:  # noqa: B008
        """Do what is due: fence, join, or send a heartbeat."""
        if self._heard_ns is None:
            self._heard_ns = now_ns
        if now_ns - self._heard_ns > self.timing.fence_ns and not self.state.is_fenced:
            self.take(LeaseEnded())
        is_due = self._spoken_ns is None or now_ns - self._spoken_ns >= self.timing.heartbeat_ns
        if not is_due:
            return RankOutput()
        self._spoken_ns = now_ns
        if not self.state.is_member:
            return self.hello()
        # The coordinator of a fenced rank may have another connection of it, or be another one.
        hello = self.hello().data if self.state.is_fenced else ()
        member, incarnation = self.state.member, self.state.incarnation
        beat: Message = Heartbeat(member, incarnation, self.state.state, self.state.epoch, *load)
        return RankOutput((*hello, encode_message(beat)))

    def hello(self) -> RankOutput:
        """Return what a new connection begins with, so that the coordinator knows it."""
        return self.take(JoinRequest())
