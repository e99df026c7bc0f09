"""A coordinator and members joined by queues that a test can cut, with a time-out at will."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.scheduling.control.coordinator import coordinate
from megatron.scheduling.control.coordinator_state import (
    ROUTER,
    ClientCommand,
    CoordinatorEvent,
    MemberLost,
    PrepareTimeout,
    Resend,
    new_coordinator,
)
from megatron.scheduling.control.member import (
    EngineTask,
    JoinRequest,
    MemberEvent,
    MemberState,
    PrepareDone,
    TaskKind,
    take_part,
)
from megatron.scheduling.control.messages import Answer, Command, Hello, Message
from megatron.scheduling.control.states import Code, CommandKind, Mode


def prepares_at_once(member: int, epoch: int) -> PrepareDone | None:
    """Return that an engine prepares whatever it is asked to."""
    return PrepareDone(epoch)


@dataclass
class Cluster:
    """An engine on one machine without time.

    Attributes:
        replicas: the replica of each rank.
        engine: what the engine of a rank makes of a transition; None while it is not done.
        silent: ranks that neither get nor send messages.
        answers: all answers that clients got, in order.
        tasks: what the engines were asked to do, with their ranks.
        routed: commands about requests that the coordinator let through.
    """

    replicas: tuple[int, ...]
    engine: Callable[[int, int], PrepareDone | None] = prepares_at_once
    silent: set[int] = field(default_factory=set)
    answers: list[tuple[str, Answer]] = field(default_factory=list)
    tasks: list[tuple[int, EngineTask]] = field(default_factory=list)
    routed: list[ClientCommand] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coordinator = new_coordinator(self.replicas)
        self.members = [MemberState(rank, 1) for rank in range(len(self.replicas))]
        self.queue: deque[tuple[int | None, Message]] = deque()  # None: to the coordinator
        self.commands = 0

    def start(self) -> None:
        """Let all ranks join that are not silent."""
        for rank, member in enumerate(self.members):
            if not member.is_member:
                self.to_member(rank, JoinRequest())
        self.deliver()

    def ask(self, command: CommandKind, mode: Mode = Mode.DEFAULT, **others: object) -> Code | None:
        """Send a command and deliver all messages; return the code of its answer, if it has one."""
        name = self.send(command, mode, **others)
        self.deliver()
        return self.code_of(name)

    def send(self, command: CommandKind, mode: Mode = Mode.DEFAULT, **others: object) -> str:
        """Send a command and deliver nothing; return its id."""
        self.commands += 1
        asked = Command(f"c{self.commands}", command, mode, **others)  # type: ignore[arg-type]
        self.to_coordinator(ClientCommand("client", asked))
        return asked.id

    def code_of(self, name: str) -> Code | None:
        """Return the code of the one answer to a command; None if it has none."""
        found = {answer for _, answer in self.answers if answer.id == name}
        assert len(found) <= 1, "a command has two answers"
        return found.pop().code if found else None

    def answer_of(self, name: str) -> Answer:
        """Return the answer to a command."""
        return next(answer for _, answer in self.answers if answer.id == name)

    def deliver(self) -> None:
        """Deliver messages until none is on its way."""
        while self.queue:
            to, message = self.queue.popleft()
            if to is None:
                self.to_coordinator(message)  # type: ignore[arg-type]
            elif to not in self.silent and to < len(self.members):
                self.to_member(to, message)  # type: ignore[arg-type]

    def time_out(self) -> None:
        """Let the time for the preparation pass, and then that in which messages are repeated."""
        if self.coordinator.transition is not None:
            self.to_coordinator(PrepareTimeout(self.coordinator.transition.epoch))
            self.deliver()
        if self.coordinator.transition is not None:
            self.to_coordinator(Resend(self.coordinator.transition.epoch))
            self.deliver()

    def lose(self, rank: int) -> None:
        """Let the lease of a rank end."""
        self.to_coordinator(MemberLost(rank))
        self.deliver()

    def restart(self, rank: int) -> None:
        """Start the process of a rank again, and let it join."""
        self.silent.discard(rank)
        self.members[rank] = MemberState(rank, self.members[rank].incarnation + 100)
        self.to_coordinator(Hello(rank, self.members[rank].incarnation))
        self.deliver()

    def to_coordinator(self, event: CoordinatorEvent) -> None:
        """Let an event happen to the coordinator."""
        self.coordinator, sends = coordinate(self.coordinator, event)
        for to, message in sends:
            if isinstance(message, ClientCommand):
                assert to == ROUTER
                self.routed.append(message)
            elif isinstance(to, str):
                assert isinstance(message, Answer)
                self.answers.append((to, message))
            else:
                self.queue.append((to, message))

    def to_member(self, rank: int, event: MemberEvent) -> None:
        """Let an event happen to a member, and its engine do what follows."""
        step = take_part(self.members[rank], event)
        self.members[rank] = step.state
        if rank not in self.silent:
            self.queue.extend((None, message) for message in step.messages)
        for task in step.tasks:
            self.tasks.append((rank, task))
            if task.kind is TaskKind.PREPARE and task.prepare is not None:
                done = self.engine(rank, task.prepare.epoch)
                if done is not None:
                    self.to_member(rank, done)
