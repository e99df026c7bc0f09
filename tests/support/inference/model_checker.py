"""Every reachable state of a coordinator, its members and a network between them, breadth first.

The functions that are checked are those of the product. States and messages are numbered, and what
a step of one part leads to is remembered, so that most of the search handles small integers.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from megatron.scheduling.control.coordinator import coordinate
from megatron.scheduling.control.coordinator_state import (
    ClientCommand,
    CoordinatorEvent,
    CoordinatorState,
    MemberLost,
    PrepareTimeout,
    Resend,
    Send,
)
from megatron.scheduling.control.member import (
    JoinRequest,
    MemberEvent,
    MemberState,
    MemberStep,
    PrepareDone,
    TaskKind,
    take_part,
)
from megatron.scheduling.control.messages import Answer, Command, Phase
from megatron.scheduling.control.states import ServingState

Coordinate = Callable[
    [CoordinatorState, CoordinatorEvent], tuple[CoordinatorState, tuple[Send, ...]]
]
TakePart = Callable[[MemberState, MemberEvent], MemberStep]
T = TypeVar("T")
CLIENT = "client"
DEAD = -1


class Budget(NamedTuple):
    """How much may go wrong."""

    losses: int = 0
    copies: int = 0
    crashes: int = 0
    refusals: int = 0


class World(NamedTuple):
    """A state of everything; parts of it are numbers of what they stand for.

    Attributes:
        coordinator: its state.
        members: their states, or DEAD.
        network: a queue for each direction of each member: messages on their way.
        sent: commands that the client has sent, as bits.
        answers: the answer to each command, or -1.
        budget: what may still go wrong.
    """

    coordinator: int
    members: tuple[int, ...]
    network: tuple[tuple[int, ...], ...]
    sent: int
    answers: tuple[int, ...]
    budget: Budget


@dataclass(frozen=True)
class Found:
    """The result of a search: how many states, and the shortest way to a wrong one."""

    states: int
    problem: str | None = None
    trace: tuple[str, ...] = ()


class Numbers:
    """Numbers of equal values."""

    def __init__(self) -> None:
        self.values: list[Hashable] = []
        self._number_of: dict[Hashable, int] = {}

    def number(self, value: Hashable) -> int:
        """Return the number of a value, a new one if it is new."""
        # With its type: named tuples of two types may be equal.
        number = self._number_of.setdefault((type(value), value), len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class ModelChecker:
    """A search over all orders of events.

    Args:
        commands: what the client may send, at any time and in any order.
        budget: what may go wrong.
        keeps_order: whether a connection delivers messages in their order, as TCP does. Without
            it, equal messages that are on their way at once are one. With it, messages are sent
            again when none is on its way.
        coordinate: the function of the coordinator, or one with an error in it.
        take_part: that of the members.
    """

    def __init__(
        self,
        commands: tuple[Command, ...],
        budget: Budget,
        *,
        keeps_order: bool = False,
        coordinate: Coordinate = coordinate,
        take_part: TakePart = take_part,
    ) -> None:
        self._commands, self._budget, self._keeps_order = commands, budget, keeps_order
        self._coordinate, self._take_part = coordinate, take_part
        self._numbers = Numbers()
        self._steps: dict[tuple[int, int], tuple[int, tuple[tuple[int, int], ...]]] = {}
        self._wrong: dict[tuple[int, tuple[int, ...]], str | None] = {}

    def search(self, coordinator: CoordinatorState, members: tuple[MemberState, ...]) -> Found:
        """Visit every state; return how many there are, or the shortest way to a wrong one."""
        first = World(
            self._numbers.number(coordinator),
            tuple(map(self._numbers.number, members)),
            ((),) * (2 * len(members)),
            0,
            (-1,) * len(self._commands),
            self._budget,
        )
        came_from: dict[World, tuple[World, str] | None] = {first: None}
        queue = deque([first])
        while queue:
            world = queue.popleft()
            quiet = True
            for label, after in self._events(world):
                quiet = False
                if after not in came_from:
                    came_from[after] = (world, label)
                    queue.append(after)
            if (problem := self._problem(world, quiet)) is not None:
                return Found(len(came_from), problem, _trace(came_from, world))
        return Found(len(came_from))

    def _value(self, number: int) -> object:
        return self._numbers.values[number]

    def _events(self, world: World) -> Iterator[tuple[str, World]]:
        for index, command in enumerate(self._commands):
            if not world.sent >> index & 1:
                sent = world._replace(sent=world.sent | 1 << index)
                yield command.command, self._to_coordinator(sent, ClientCommand(CLIENT, command))
        yield from self._deliveries(world)
        yield from self._timeouts(world)
        for member, number in enumerate(world.members):
            if number == DEAD:
                continue
            if world.budget.crashes:
                budget = world.budget._replace(crashes=world.budget.crashes - 1)
                members = _replaced(world.members, member, DEAD)
                yield f"{member} dies", world._replace(members=members, budget=budget)
            state = self._value(number)
            assert isinstance(state, MemberState)
            if not state.is_member:
                after = self._to_member(world, member, JoinRequest())
                if after != world:
                    yield f"{member} says hello", after

    def _deliveries(self, world: World) -> Iterator[tuple[str, World]]:
        count = len(world.members)
        for place, queue in enumerate(world.network):
            for index, number in enumerate(queue[:1] if self._keeps_order else queue):
                rest = _replaced(world.network, place, (*queue[:index], *queue[index + 1 :]))
                without, message = world._replace(network=rest), self._value(number)
                losses, copies = world.budget.losses, world.budget.copies
                yield f"{message}", self._deliver(without, place % count, place < count, number)
                if losses:
                    budget = world.budget._replace(losses=losses - 1)
                    yield f"lost: {message}", without._replace(budget=budget)
                if copies:
                    kept = world._replace(budget=world.budget._replace(copies=copies - 1))
                    after = self._deliver(kept, place % count, place < count, number)
                    yield f"copy: {message}", after

    def _timeouts(self, world: World) -> Iterator[tuple[str, World]]:
        coordinator = self._value(world.coordinator)
        assert isinstance(coordinator, CoordinatorState)
        transition = coordinator.transition
        if transition is not None:
            if not (self._keeps_order and any(world.network)):
                again = self._to_coordinator(world, Resend(transition.epoch))
                if again != world:
                    yield "sent again", again
            if transition.phase is Phase.PREPARE:
                after = self._to_coordinator(world, PrepareTimeout(transition.epoch))
                if after != world:
                    yield "prepare times out", after
        for member, number in enumerate(world.members):
            if number == DEAD and member in coordinator.members:
                yield f"{member} is removed", self._to_coordinator(world, MemberLost(member))

    def _deliver(self, world: World, member: int, to_member: bool, number: int) -> World:
        message = self._value(number)
        if to_member:
            return self._to_member(world, member, message)  # type: ignore[arg-type]
        return self._to_coordinator(world, message)  # type: ignore[arg-type]

    def _to_coordinator(self, world: World, event: CoordinatorEvent) -> World:
        key = (world.coordinator, self._numbers.number(event))
        if key not in self._steps:
            state = self._value(world.coordinator)
            assert isinstance(state, CoordinatorState)
            after, sends = self._coordinate(state, event)
            numbered = (
                (-1 if isinstance(one.to, str) else one.to, self._numbers.number(one.message))
                for one in sends
            )
            self._steps[key] = self._numbers.number(after), tuple(numbered)
        number, sends_to = self._steps[key]
        world = world._replace(coordinator=number)
        for to, message in sends_to:
            world = self._put(world, to, message) if to >= 0 else self._answered(world, message)
        return world

    def _to_member(self, world: World, member: int, event: MemberEvent) -> World:
        if world.members[member] == DEAD:
            return world
        key = (world.members[member], self._numbers.number(event))
        if key not in self._steps:
            state = self._value(world.members[member])
            assert isinstance(state, MemberState)
            step = self._take_part(state, event)
            messages = [(0, self._numbers.number(message)) for message in step.messages]
            # The engine prepares at once, or refuses if the budget allows it.
            prepares = (task for task in step.tasks if task.kind is TaskKind.PREPARE)
            messages += [(1, task.prepare.epoch) for task in prepares if task.prepare is not None]
            self._steps[key] = self._numbers.number(step.state), tuple(messages)
        number, outputs = self._steps[key]
        world = world._replace(members=_replaced(world.members, member, number))
        for kind, output in outputs:
            if kind == 0:
                world = self._put(world, len(world.members) + member, output)
            elif world.budget.refusals:  # the first engines refuse
                budget = world.budget._replace(refusals=world.budget.refusals - 1)
                refusal = PrepareDone(output, "capacity", "no memory")
                world = self._to_member(world._replace(budget=budget), member, refusal)
            else:
                world = self._to_member(world, member, PrepareDone(output))
        return world

    def _put(self, world: World, place: int, message: int) -> World:
        queue = world.network[place]
        if message in queue:
            return world
        queue = (*queue, message)
        queue = queue if self._keeps_order else tuple(sorted(queue))
        return world._replace(network=_replaced(world.network, place, queue))

    def _answered(self, world: World, number: int) -> World:
        answer = self._value(number)
        assert isinstance(answer, Answer)
        index = next(i for i, command in enumerate(self._commands) if command.id == answer.id)
        before = world.answers[index]
        return world._replace(
            answers=_replaced(world.answers, index, number if before in (-1, number) else -2)
        )

    def _problem(self, world: World, quiet: bool) -> str | None:
        if -2 in world.answers:
            return "a command has two answers"
        if quiet and -1 in world.answers:
            return "a client waits for ever"
        key = (world.coordinator, world.members)
        if key not in self._wrong:
            self._wrong[key] = self._disagreement(world)
        return self._wrong[key]

    def _disagreement(self, world: World) -> str | None:
        coordinator = self._value(world.coordinator)
        assert isinstance(coordinator, CoordinatorState)
        live = []
        for member in sorted(coordinator.members):
            if world.members[member] != DEAD:
                state = self._value(world.members[member])
                assert isinstance(state, MemberState)
                live += [state] * (state.incarnation == coordinator.incarnations[member])
        finished: dict[int, ServingState] = {}
        for state in live:
            if finished.setdefault(state.epoch, state.state) is not state.state:
                return "members end one transition in two states"
        if coordinator.transition is None:
            if any(state.state is not coordinator.state for state in live):
                return "the coordinator's state is not that of every member"
            if any(state.prepared is not None for state in live):
                return "a member waits for the decision of a transition that has ended"
        return None


def _replaced(items: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*items[:index], value, *items[index + 1 :])


def _trace(came_from: dict[World, tuple[World, str] | None], world: World) -> tuple[str, ...]:
    labels: list[str] = []
    while (link := came_from[world]) is not None:
        world, label = link
        labels.append(label)
    return tuple(reversed(labels))
