"""One rank schedules and records what it did; the others do the same and compare their plans.

A record has everything that a plan depends on, the time included, so that no rank decides by its
own clock. Records are numbered: one that is missing or comes twice stops the rank that notices.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from megatron.errors import CollectiveError
from megatron.scheduling.forward_plan import ForwardPlan, plan_digest
from megatron.scheduling.requests import Request
from megatron.scheduling.scheduler import Scheduler

Propose: TypeAlias = Callable[[ForwardPlan], Mapping[int, Sequence[int]]]


class ReplayError(CollectiveError):
    """A rank cannot follow the one that schedules: a record is missing, or the plans differ."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that the leader queued."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abortion:
    """A request that the leader was told to end."""

    request: str


@dataclass(frozen=True, slots=True)
class SampleStop:
    """A sample whose text was complete."""

    sequence: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """The step before was computed: drawn tokens by sequence, and sequences that a string ends."""

    drawn: Mapping[int, tuple[int, ...]]
    stopped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepFailure:
    """The step before could not be computed."""

    detail: str


@dataclass(frozen=True, slots=True)
class SequenceFailures:
    """Sequences of the step before whose scores cannot be used, with what is wrong."""

    failed: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class CacheDrop:
    """All keys and values are forgotten; the weights have a new version, unless it is None."""

    weights_version: int | None


SchedulerCommand = (
    Submission | Abortion | SampleStop | StepResult | StepFailure | SequenceFailures | CacheDrop
)


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What happened before a plan, and the plan's digest.

    Attributes:
        round: its number, counted from 1.
        now_ns: the time at which the leader planned.
        commands: what changed the scheduler since the last plan, in order.
        digest: `plan_digest` of the leader's plan, with its drafts.
        drafts: the tokens that the leader proposed for sequences of the plan.
    """

    round: int
    now_ns: int
    commands: tuple[SchedulerCommand, ...]
    digest: bytes
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class LeadingScheduler:
    """The scheduler of the rank that decides. A command that is refused is not recorded."""

    scheduler: Scheduler
    round: int = 0
    _commands: list[SchedulerCommand] = field(default_factory=list)

    def submit(self, request: Request) -> tuple[int, ...]:
        """Queue a request; see `Scheduler.submit`."""
        sequences = self.scheduler.submit(request)
        self._commands.append(Submission(request))
        return sequences

    def abort(self, request: str) -> bool:
        """End a request; return whether there was one to end."""
        self._commands.append(Abortion(request))
        return self.scheduler.abort(request)

    def stop_sample(self, sequence: int) -> bool:
        """End one sample; see `Scheduler.stop_sample`."""
        self._commands.append(SampleStop(sequence))
        return self.scheduler.stop_sample(sequence)

    def complete(self, drawn: Mapping[int, Sequence[int]], stopped: Collection[int] = ()) -> None:
        """Take the result of a step; see `Scheduler.complete`."""
        self.scheduler.complete(drawn, stopped)
        tokens = {sequence: tuple(each) for sequence, each in drawn.items()}
        self._commands.append(StepResult(tokens, tuple(sorted(stopped))))

    def fail_step(self, detail: str) -> None:
        """End the requests of a step; see `Scheduler.fail_step`."""
        self.scheduler.fail_step(detail)
        self._commands.append(StepFailure(detail))

    def fail_sequences(self, failed: Mapping[int, str]) -> None:
        """End the requests of some sequences of a step; see `Scheduler.fail_sequences`."""
        self.scheduler.fail_sequences(failed)
        self._commands.append(SequenceFailures(dict(failed)))

    def drop_cache(self, weights_version: int | None = None) -> None:
        """Forget all keys and values; see `Scheduler.drop_cache`."""
        self.scheduler.drop_cache(weights_version)
        self._commands.append(CacheDrop(weights_version))

    def plan(
        self, now_ns: int, propose: Propose = lambda plan: {}
    ) -> tuple[ForwardPlan, RoundRecord]:
        """Return the next plan, and the record from which the other ranks make the same.

        Args:
            propose: tokens for the sequences of a plan, no more than it has room for; it does not
                raise, as the others do not know of the plan yet.
        """
        plan = self.scheduler.plan(now_ns)
        drafts = {sequence: tuple(tokens) for sequence, tokens in propose(plan).items()}
        plan = self.scheduler.propose(drafts)
        self.round += 1
        commands, self._commands = tuple(self._commands), []
        return plan, RoundRecord(self.round, now_ns, commands, plan_digest(plan), drafts)


@dataclass(slots=True)
class FollowingScheduler:
    """The scheduler of a rank that repeats what the leader recorded."""

    scheduler: Scheduler
    round: int = 0

    def follow(self, record: RoundRecord) -> ForwardPlan:
        """Repeat a record; return its plan.

        Raises:
            ReplayError: it is not the record after the last one, or its plan is another here.
        """
        if record.round != self.round + 1:
            raise ReplayError(
                "a record of the scheduler is missing, or came twice",
                found=f"round {record.round} after round {self.round}",
                fix="start the ranks of this engine again; report this as a bug",
            )
        for command in record.commands:
            self._apply(command)
        self.scheduler.plan(record.now_ns)
        plan = self.scheduler.propose(record.drafts)
        if (digest := plan_digest(plan)) != record.digest:
            raise ReplayError(
                "two ranks plan different steps from the same commands",
                found=f"round {record.round}: {digest.hex()} here, {record.digest.hex()} on the "
                "rank that schedules",
                fix="run the same code with the same limits on all ranks; report this as a bug",
            )
        self.round = record.round
        return plan

    def _apply(self, command: SchedulerCommand) -> None:
        match command:
            case Submission(request):
                self.scheduler.submit(request)
            case Abortion(request=name):
                self.scheduler.abort(name)
            case SampleStop(sequence):
                self.scheduler.stop_sample(sequence)
            case StepResult(drawn, stopped):
                self.scheduler.complete(drawn, stopped)
            case StepFailure(detail):
                self.scheduler.fail_step(detail)
            case SequenceFailures(failed):
                self.scheduler.fail_sequences(failed)
            case CacheDrop(version):
                self.scheduler.drop_cache(version)
