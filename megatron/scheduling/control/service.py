"""The coordinator with its connections, its times and the requests of its clients.

Bytes and the time come in, bytes go out; who carries them is left to others. No bytes end it: what
is no message is refused to its connection and counted, and so is what nobody is there to get.
"""

from collections import Counter
from typing import NamedTuple

from megatron.scheduling.control.coordinator import coordinate
from megatron.scheduling.control.coordinator_state import (
    ClientCommand,
    CoordinatorEvent,
    MemberLost,
    PrepareTimeout,
    Resend,
    new_coordinator,
)
from megatron.scheduling.control.messages import (
    Ack,
    Answer,
    Command,
    Failed,
    Heartbeat,
    Hello,
    Joined,
    Message,
    MessageError,
    Nack,
    Phase,
    RequestAbort,
    RequestDone,
    RequestProgress,
    RequestStart,
    decode_message,
    encode_message,
)
from megatron.scheduling.control.routing import RequestRouter
from megatron.scheduling.control.states import Code, CommandKind, ServingState
from megatron.scheduling.control.timing import ControlTiming

MAX_REQUESTS = 1 << 16


class Outgoing(NamedTuple):
    """Bytes for a connection."""

    connection: str
    data: bytes


class ControlService:
    """One coordinator.

    Args:
        replicas: the replica of each rank.
        timing: how long is waited.
        term: larger than that of any coordinator before it.

    Attributes:
        counts: messages that were refused ("malformed", "not_from_member") or dropped
            ("unroutable"), members that were lost ("lost"), and times that this process stood still
            longer than a heartbeat ("pauses").
        beats: the newest heartbeat of each rank.
    """

    def __init__(
        self,
        replicas: tuple[int, ...],
        timing: ControlTiming,
        *,
        term: int = 1,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        self.state = new_coordinator(replicas, term=term)
        self.router = RequestRouter(max_requests)
        self.counts: Counter[str] = Counter()
        self.beats: dict[int, Heartbeat] = {}
        self._timing = timing
        self._connections: set[str] = set()
        self._connection_of: dict[int, str] = {}  # of the newest incarnation of a rank
        self._heard_ns: dict[int, int] = {}
        self._prepare_until_ns = self._resend_ns = 0
        self._now_ns = 0
        self._ticked_ns: int | None = None
        self._outgoing: list[Outgoing] = []

    def connect(self, connection: str) -> None:
        """Take a connection, of a client or of a rank: its messages will show."""
        self._connections.add(connection)

    def disconnect(self, connection: str, now_ns: int) -> list[Outgoing]:
        """Forget a connection, and end the requests of its client."""
        self._now_ns = now_ns
        self._connections.discard(connection)
        for request, replica in self.router.lose_client(connection):
            self._send_to_replica(replica, request, RequestAbort)
        return self._taken()

    def receive(self, connection: str, data: bytes, now_ns: int) -> list[Outgoing]:
        """Take bytes from a connection; return what is to be sent."""
        self._now_ns = now_ns
        try:
            message = decode_message(data)
        except MessageError as error:
            self.counts["malformed"] += 1
            self._refuse(connection, f"{error.problem}: {error.found}")
            return self._taken()
        match message:
            case Command():
                self._handle(ClientCommand(connection, message))
            case Hello():
                self._hello(connection, message)
            case Joined() | Ack() | Nack() | Heartbeat() | Failed():
                if self._is_from_member(connection, message.member, message.incarnation):
                    if isinstance(message, Heartbeat):
                        self.beats[message.member] = message
                    self._handle(message)
            case RequestProgress():
                if self._is_from_member(connection, message.member, message.incarnation):
                    self._progress(message)
            case RequestDone():
                if self._is_from_member(connection, message.member, message.incarnation):
                    self._done(message)
            case _:
                self.counts["malformed"] += 1
                self._refuse(connection, f"a coordinator takes no {type(message).__name__}")
        return self._taken()

    def tick(self, now_ns: int) -> list[Outgoing]:
        """Do what is due; to be called about as often as members send heartbeats."""
        self._now_ns = now_ns
        self._excuse_own_pause(now_ns)
        for member in sorted(self.state.members):
            if member in self.state.members and now_ns > self._lease_end_ns(member):
                self._handle(MemberLost(member))
        transition = self.state.transition
        if transition is not None:
            if transition.phase is Phase.PREPARE and now_ns >= self._prepare_until_ns:
                self._handle(PrepareTimeout(transition.epoch))
            elif now_ns >= self._resend_ns:
                self._resend_ns = now_ns + self._timing.heartbeat_ns
                self._handle(Resend(transition.epoch))
        return self._taken()

    def _excuse_own_pause(self, now_ns: int) -> None:
        """Give members the time in which this process stood still and could not hear them."""
        last_ns, self._ticked_ns = self._ticked_ns, now_ns
        if last_ns is None or (pause_ns := now_ns - last_ns - self._timing.heartbeat_ns) <= 0:
            return
        self._heard_ns = {rank: heard + pause_ns for rank, heard in self._heard_ns.items()}
        self._prepare_until_ns += pause_ns
        self.counts["pauses"] += 1

    def _lease_end_ns(self, member: int) -> int:
        return self._heard_ns[member] + self._timing.lease_ns

    def _hello(self, connection: str, hello: Hello) -> None:
        known = self.state.incarnations
        if not 0 <= hello.member < len(known):
            self._refuse(connection, f"there is no rank {hello.member} of {len(known)}")
        elif hello.incarnation < known[hello.member]:
            self._refuse(connection, f"a newer process has rank {hello.member}")
        else:
            self._connection_of[hello.member] = connection
            self._heard_ns[hello.member] = self._now_ns
            self._handle(hello)

    def _is_from_member(self, connection: str, member: int, incarnation: int) -> bool:
        """Return whether a message comes from the newest process of a rank; else refuse it."""
        known = self.state.incarnations
        is_newest = self._connection_of.get(member) == connection and 0 <= member < len(known)
        if is_newest and known[member] == incarnation:
            self._heard_ns[member] = self._now_ns
            return True
        self.counts["not_from_member"] += 1
        self._refuse(connection, f"this is not incarnation {incarnation} of rank {member}")
        return False

    def _refuse(self, connection: str, detail: str) -> None:
        answer = Answer("", Code.BAD_COMMAND, self.state.shown, self.state.epoch, detail[:1000])
        self._send(connection, answer)

    def _handle(self, event: CoordinatorEvent) -> None:
        before = self.state
        self.state, sends = coordinate(before, event)
        self._follow_transition(before.epoch)
        for to, message in sends:
            if isinstance(message, ClientCommand):
                self._route(message)
            else:
                self._send(to if isinstance(to, str) else self._connection_of.get(to), message)
        lost = before.members - self.state.members
        self.counts["lost"] += len(lost)
        for replica in sorted({before.replicas[member] for member in lost}):
            self._lose_replica(replica)
        if self.state.state is ServingState.STOPPED:
            for replica in sorted(set(self.state.replicas)):
                for request, client in self.router.lose_replica(replica, ()).failed:
                    self._send(client, RequestDone(-1, 0, request, "aborted", "it was stopped"))

    def _follow_transition(self, epoch: int) -> None:
        """Set the times of a transition that has begun."""
        transition = self.state.transition
        if transition is not None and transition.epoch != epoch:
            kind, remaining_ms = transition.kind, transition.remaining_ms
            limit_ns = self._timing.preparation_ns(kind, remaining_ms)
            self._prepare_until_ns = self._now_ns + limit_ns
            self._resend_ns = self._now_ns + self._timing.heartbeat_ns

    def _route(self, asked: ClientCommand) -> None:
        command, request = asked.command, asked.command.request
        replica = self.router.replica_of(request)
        if command.command is CommandKind.ABORT:
            if replica is not None:
                self._send_to_replica(replica, request, RequestAbort, sample=command.sample)
            self._answer(asked, Code.NOT_FOUND if replica is None else Code.OK)
        elif replica is not None:
            self._answer(asked, Code.BAD_COMMAND, f"request {request} has not ended")
        elif self.router.is_full:
            self._answer(asked, Code.TOO_MANY, f"{len(self.router)} requests have not ended")
        else:
            payload = command.payload
            replica = self.router.add(request, asked.client, self._live_replicas(), payload)
            self._send_to_replica(replica, request, RequestStart, payload=payload)
            self._answer(asked, Code.ACCEPTED)

    def _answer(self, asked: ClientCommand, code: Code, detail: str = "") -> None:
        state, epoch = self.state.shown, self.state.epoch
        self._send(asked.client, Answer(asked.command.id, code, state, epoch, detail))

    def _progress(self, message: RequestProgress) -> None:
        client = self.router.start(message.request, self.state.replicas[message.member])
        if client is not None:
            self._send(client, message)

    def _done(self, message: RequestDone) -> None:
        client = self.router.end(message.request, self.state.replicas[message.member])
        if client is not None:
            self._send(client, message)

    def _lose_replica(self, replica: int) -> None:
        lost = self.router.lose_replica(replica, self._live_replicas())
        for request, other, payload in lost.moved:
            self._send_to_replica(other, request, RequestStart, payload=payload)
        for request, client in lost.failed:
            detail = f"engine_lost: replica {replica} is gone"
            self._send(client, RequestDone(-1, 0, request, "failed", detail))

    def _live_replicas(self) -> set[int]:
        return {self.state.replicas[member] for member in self.state.members}

    def _send_to_replica(
        self,
        replica: int,
        request: str,
        kind: type[RequestStart] | type[RequestAbort],
        **fields: str | int,
    ) -> None:
        """Send a message about a request to the first rank of a replica."""
        leader = self.state.replicas.index(replica)
        place = (self.state.term, leader, self.state.incarnations[leader])
        message = kind(*place, request, **fields)  # type: ignore[arg-type]
        self._send(self._connection_of.get(leader), message)

    def _send(self, connection: str | None, message: Message) -> None:
        if connection is None or connection not in self._connections:
            self.counts["unroutable"] += 1
            return
        self._outgoing.append(Outgoing(connection, encode_message(message)))

    def _taken(self) -> list[Outgoing]:
        outgoing, self._outgoing = self._outgoing, []
        return outgoing
