"""A coordinator, ranks and clients that exchange bytes, under a clock that the test moves."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from megatron.scheduling.control.member import PrepareDone, TaskKind
from megatron.scheduling.control.messages import (
    Answer,
    Command,
    Message,
    RequestAbort,
    RequestDone,
    RequestStart,
    decode_message,
    encode_message,
)
from megatron.scheduling.control.rank_service import RankOutput, RankService
from megatron.scheduling.control.service import ControlService, Outgoing
from megatron.scheduling.control.states import Code, CommandKind, Mode
from megatron.scheduling.control.timing import ControlTiming

TICK_NS = 100_000_000
TIMING = ControlTiming()


@dataclass
class ServiceNetwork:
    """Ranks whose engines prepare at once, unless they are told to be busy.

    Attributes:
        replicas: the replica of each rank.
        dead: ranks that neither take nor send anything; a process that was killed or stopped.
        busy: ranks whose engines do not finish what they prepare.
        got: what each client got, in order.
        requests: what each rank was told about requests.
        taken: the same of all ranks, in order, as messages.
        engines: ranks whose tasks and requests a test takes itself.
    """

    replicas: tuple[int, ...]
    dead: set[int] = field(default_factory=set)
    busy: set[int] = field(default_factory=set)
    got: dict[str, list[Message]] = field(default_factory=dict)
    requests: dict[int, list[str]] = field(default_factory=dict)
    taken: list[RequestStart | RequestAbort] = field(default_factory=list)
    engines: dict[int, Callable[[RankOutput], None]] = field(default_factory=dict)
    now_ns: int = 0

    def __post_init__(self) -> None:
        self.service = ControlService(self.replicas, TIMING)
        self.ranks = [RankService(rank, 1, TIMING) for rank in range(len(self.replicas))]
        self.commands = 0
        for rank in range(len(self.replicas)):
            self.service.connect(f"rank {rank}")

    def pass_time(self, seconds: float) -> None:
        """Let time pass: ranks and the coordinator do what is due."""
        for _ in range(round(seconds * 1e9 / TICK_NS)):
            self.now_ns += TICK_NS
            for number, rank in enumerate(self.ranks):
                if number not in self.dead:
                    self.from_rank(number, rank.tick(self.now_ns))
            self.to_connections(self.service.tick(self.now_ns))

    def start(self) -> None:
        """Let the ranks join."""
        self.pass_time(2.0)
        assert self.service.state.shown == "running"

    def ask(
        self, client: str, command: CommandKind, mode: Mode = Mode.DEFAULT, **others: object
    ) -> Code | None:
        """Send a command of a client; return the code of its answer, if there is one yet."""
        self.service.connect(client)
        self.got.setdefault(client, [])
        self.commands += 1
        asked = Command(f"c{self.commands}", command, mode, **others)  # type: ignore[arg-type]
        self.send(client, encode_message(asked))
        return self.code_of(client, asked.id)

    def code_of(self, client: str, command: str) -> Code | None:
        """Return the code of the answer to a command; None if there is none."""
        found = [one for one in self.got[client] if isinstance(one, Answer) and one.id == command]
        assert len(found) <= 1
        return found[0].code if found else None

    def ends_of(self, client: str) -> list[tuple[str, str]]:
        """Return the requests of a client that have ended, with how."""
        return [
            (one.request, one.status) for one in self.got[client] if isinstance(one, RequestDone)
        ]

    def send(self, connection: str, data: bytes) -> None:
        """Let bytes arrive at the coordinator."""
        self.to_connections(self.service.receive(connection, data, self.now_ns))

    def finish(self, rank: int, request: str) -> None:
        """Let a rank say that a request is completed."""
        incarnation = self.ranks[rank].state.incarnation
        self.send(
            f"rank {rank}", encode_message(RequestDone(rank, incarnation, request, "completed"))
        )

    def to_connections(self, outgoing: Iterable[Outgoing]) -> None:
        """Deliver bytes of the coordinator."""
        for connection, data in outgoing:
            if not connection.startswith("rank "):
                self.got.setdefault(connection, []).append(decode_message(data))
                continue
            rank = int(connection.removeprefix("rank "))
            if rank not in self.dead:
                self.from_rank(rank, self.ranks[rank].receive(data, self.now_ns))

    def from_rank(self, rank: int, output: RankOutput) -> None:
        """Deliver bytes of a rank, and let its engine do its tasks."""
        for data in output.data:
            self.send(f"rank {rank}", data)
        for request in output.requests:
            kind = {RequestStart: "start", RequestAbort: "abort"}[type(request)]
            self.requests.setdefault(rank, []).append(f"{kind} {request.request}")
            self.taken.append(request)
        if rank in self.engines:
            self.engines[rank](output)
            return
        for task in output.tasks:
            if task.kind is TaskKind.PREPARE and task.prepare is not None and rank not in self.busy:
                self.from_rank(rank, self.ranks[rank].take(PrepareDone(task.prepare.epoch)))
