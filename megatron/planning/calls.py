"""Counts what a rank sends: by phase of the step, axis of the grid and operation.

A log is notified of every communication before it is made (`CallObserver`). Bytes are those that a
rank passes to a call; how many of them travel depends on the algorithm.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NamedTuple

from torch import Tensor

from megatron.mpu.collective_checks import MessageRecord
from megatron.mpu.context import Group, ParallelContext, ReplicaGroups, Replicas
from megatron.timers import Timer, Timers


class CallKind(NamedTuple):
    """Calls that are summed up."""

    phase: str
    axis: str  # a field of `ParallelContext`
    operation: str
    ranks: tuple[int, ...]  # of the group; of messages this rank and the other one


class CallSum(NamedTuple):
    """A number of calls, and the bytes that this rank gave to all of them."""

    calls: int
    bytes: int


class Phases(Timers):
    """Timers that know which of them runs: the part of a step that this process is in."""

    def __init__(self) -> None:
        super().__init__()
        self._running: list[str] = []

    @property
    def now(self) -> str:
        """The innermost timer that runs; of none, "between"."""
        return self._running[-1] if self._running else "between"

    def __call__(self, name: str) -> Timer:
        """Return the timer called `name`."""
        return _Phase(name, self._running)


class _Phase(Timer):
    def __init__(self, name: str, running: list[str]) -> None:
        super().__init__(name)
        self._running = running

    def start(self) -> None:
        self._running.append(self.name)

    def stop(self) -> None:
        self._running.remove(self.name)


class CallLog:
    """All calls of one rank of a world that is not there, and what other ranks gather.

    Args:
        rank: the global rank that this process stands in for.
        stages: the objects that each pipeline stage gathers, in order; empty: those of this stage.
    """

    def __init__(
        self, phases: Phases, rank: int, *, stages: Sequence[Sequence[object]] = ()
    ) -> None:
        self.objects: list[object] = []  # that this rank gave to the gathers of its stages
        self.shapes: set[tuple[tuple[int, ...], object]] = set()  # and dtypes, of stages' messages
        self._phases, self._rank = phases, rank
        self._stages = stages
        self._counts: Counter[CallKind] = Counter()
        self._bytes: Counter[CallKind] = Counter()

    def watch(self, context: ParallelContext) -> ParallelContext:
        """Return the context whose groups report to this log, each under its name."""
        groups = {
            field.name: replace(group, observer=_Axis(self, field.name))
            for field in fields(context)
            if isinstance(group := getattr(context, field.name), Group)
        }
        replicas = ReplicaGroups(
            self._watched(context.replicas.dense, "dp_cp"),
            self._watched(context.replicas.experts, "edp"),
        )
        return replace(context, **groups, replicas=replicas)  # type: ignore[arg-type]

    def _watched(self, replicas: Replicas, name: str) -> Replicas:
        """Return the ranks that hold the same parameters, all parts of them under one name."""
        observer = _Axis(self, name)
        across = replicas.across
        return Replicas(
            replace(replicas.all, observer=observer),
            replace(replicas.sharing, observer=observer),
            None if across is None else replace(across, observer=observer),
        )

    def totals(self) -> dict[CallKind, CallSum]:
        """Return the sums since the last time, and begin anew."""
        found = {kind: CallSum(self._counts[kind], self._bytes[kind]) for kind in self._counts}
        self._counts.clear()
        self._bytes.clear()
        return found

    def add(self, axis: str, operation: str, ranks: Sequence[int], sent: int) -> None:
        """Count a call."""
        kind = CallKind(self._phases.now, axis, operation, tuple(ranks))
        self._counts[kind] += 1
        self._bytes[kind] += sent

    def message(self, axis: str, message: MessageRecord) -> None:
        """Count a message that is sent."""
        if axis == "pp" and self._phases.now == "pipeline-exchange":
            self.shapes.add((tuple(message.tensor.shape), message.tensor.dtype))
        if message.sends:
            self.add(axis, "send", (self._rank, message.peer), _size(message.tensor))

    def answer(self, axis: str, obj: object, ranks: Sequence[int]) -> list[object]:
        """Return what each of `ranks` gathers where this one has `obj`."""
        if axis != "pp":
            return [obj] * len(ranks)
        self.objects.append(obj)
        at = len(self.objects) - 1
        return [stage[at] for stage in self._stages] or [obj] * len(ranks)


class _Axis:
    """Reports the calls of one group (`CallObserver`)."""

    def __init__(self, log: CallLog, name: str) -> None:
        self._log, self._name = log, name

    def collective(
        self, operation: str, tensor: Tensor | None, ranks: Sequence[int], *, is_equal: bool = True
    ) -> None:
        """Count a call by its name without arguments."""
        del is_equal
        sent = 0 if tensor is None else _size(tensor)
        self._log.add(self._name, operation.partition("(")[0], ranks, sent)

    def messages(self, messages: Sequence[MessageRecord]) -> None:
        """Count those that are sent."""
        for message in messages:
            self._log.message(self._name, message)

    def objects_of_absent(self, obj: object, ranks: Sequence[int]) -> list[object]:
        """Return what each of `ranks` gathers."""
        return self._log.answer(self._name, obj, ranks)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
