"""What follows every training step, as small objects that the loop calls in a fixed order.

A hook gets the progress after the step and what the step did. It returns the progress, advanced if
the hook itself consumed samples. All ranks call each hook at the same steps. What a reader would
get wrong: the next step has been started by then, unless a hook says that it has to wait.
"""

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from megatron.config.training import TrainingConfig
from megatron.engine.base import Engine, RawBatch, StepPlan, StepReport
from megatron.loop.anomaly import check_numbers
from megatron.loop.report import StepLog
from megatron.mpu.context import Group
from megatron.peers.goodput import AccountKeeper
from megatron.preflight.agreement import agree_on_state
from megatron.progress import Progress


class CompletedStep(NamedTuple):
    """A step that was just done.

    Attributes:
        plan: what was planned.
        result: the engine's report.
        batches: the raw micro-batches of this replica, to compute it again from.
    """

    plan: StepPlan
    result: StepReport
    batches: Sequence[RawBatch] = ()


class Hook(Protocol):
    """An action after a step, if it is due."""

    def __call__(self, progress: Progress, step: CompletedStep, /) -> Progress:
        """Do the action; return the progress that the run continues from."""

    def precedes_next_step(self, progress: Progress) -> bool:
        """Return whether the next step must not start before this hook is called.

        It is then called while no step runs. Of `progress` only what no report decides is known
        yet: iterations, samples and tokens.
        """


@dataclass(frozen=True, slots=True)
class ReportStep:
    """Write the step to the terminal and to TensorBoard."""

    step_log: StepLog
    engine: Engine
    with_params_norm: bool  # --log-params-norm; all ranks compute it together

    def __call__(self, progress: Progress, step: CompletedStep, /) -> Progress:
        """Report the step; the clock of the log stops here."""
        norms = {"params_norm": self.engine.params_norm()} if self.with_params_norm else {}
        self.step_log.step(progress, step.plan, step.result, **norms)
        return progress

    def precedes_next_step(self, progress: Progress) -> bool:
        """Return whether a line is due, whose time ends here, or the parameters are read."""
        return self.with_params_norm or self.step_log.has_line(progress)


@dataclass(frozen=True, slots=True)
class CollectGarbage:
    """Collect Python's garbage every --manual-gc-interval; not at all where that is 0."""

    interval: int

    def __call__(self, progress: Progress, step: CompletedStep, /) -> Progress:
        """Collect if it is due, on all ranks after the same step: none then waits for another."""
        if due(self.interval, progress):
            gc.collect()
        return progress

    def precedes_next_step(self, progress: Progress) -> bool:
        """Return False: what is garbage has nothing to do with the step."""
        return False


@contextmanager
def collecting_by_hand(is_wanted: bool) -> Iterator[None]:
    """Keep Python from collecting garbage by itself inside the block, if that is wanted."""
    if not is_wanted or not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def collected_around(is_wanted: bool) -> Iterator[None]:
    """Collect Python's garbage before and after the block, if that is wanted."""
    if is_wanted:
        gc.collect()
    yield
    if is_wanted:
        gc.collect()


@dataclass(frozen=True, slots=True)
class CheckNumbers:
    """Check that the loss and the gradient norm are finite."""

    training: TrainingConfig
    engine: Engine

    def __call__(self, progress: Progress, step: CompletedStep, /) -> Progress:
        """Raise NumericsError, on every rank alike, under --nonfinite-policy.

        The step is then computed again, to say where the first such number appears; of several in
        a row that are skipped the first one.
        """
        check_numbers(step.result, progress, self.training, partial(self._origin, step))
        return progress

    def _origin(self, step: CompletedStep) -> str | None:
        diagnosis = self.engine.diagnosis()
        if diagnosis is None:
            return None
        found = diagnosis.find_nonfinite(step.batches, step.plan)
        return found or "nowhere: computed again, with the weights of now, all numbers are finite"

    def precedes_next_step(self, progress: Progress) -> bool:
        """Return False: a step that is not finite changes nothing, however late that is read."""
        return False


@dataclass(frozen=True, slots=True)
class AgreeOnState:
    """Compare counters and the loss scale over all ranks, every --check-agreement-interval."""

    engine: Engine
    world: Group
    interval: int | None

    def __call__(self, progress: Progress, step: CompletedStep, /) -> Progress:
        """Raise NumericsError on every rank if the state of one rank differs."""
        if due(self.interval, progress):
            agree_on_state(state_of(progress, self.engine), self.world)
        return progress

    def precedes_next_step(self, progress: Progress) -> bool:
        """Return whether the comparison is due."""
        return due(self.interval, progress)


@dataclass(frozen=True, slots=True)
class KeepAccount:
    """Write down where the time of this start went, for a supervisor that asked for it."""

    keeper: AccountKeeper | None

    def __call__(self, progress: Progress, step: CompletedStep, /) -> Progress:
        """Write the account, if that is due."""
        if self.keeper is not None:
            self.keeper.keep(progress.iteration)
        return progress

    def precedes_next_step(self, progress: Progress) -> bool:
        """Return False: the account is of time, not of results."""
        return False


@dataclass(frozen=True, slots=True)
class CheckRepeats:
    """Compute the first micro-batch of a step twice, every --rerun-check-interval."""

    engine: Engine
    interval: int

    def __call__(self, progress: Progress, step: CompletedStep, /) -> Progress:
        """Raise MachineError on every rank if the bits of one rank differ."""
        if due(self.interval, progress):
            diagnosis = self.engine.diagnosis()
            assert diagnosis is not None  # noqa: S101  # invariant: refused before training
            diagnosis.check_repeats(step.batches, step.plan)
        return progress

    def precedes_next_step(self, progress: Progress) -> bool:
        """Return whether it is due: the weights must stay as they are meanwhile."""
        return due(self.interval, progress)


class SaveCheckpoints:
    """Save at intervals, and once more at the end if the last step was not saved."""

    def __init__(
        self,
        save: Callable[[Progress], None],
        *intervals: int | None,
        also: Collection[int] = (),
        saved_iteration: int,
    ) -> None:
        """Call `save` at every one of `intervals`, and after the iterations `also`.

        `saved_iteration` is the one that this process began with, as far as it is saved.
        """
        self._save, self._intervals, self._also = save, intervals, also
        self._saved_iteration = saved_iteration

    def __call__(self, progress: Progress, step: CompletedStep, /) -> Progress:
        """Save if one of the intervals is due."""
        if self.precedes_next_step(progress):
            self.save_unsaved(progress)
        return progress

    def precedes_next_step(self, progress: Progress) -> bool:
        """Return whether a save is due."""
        is_due = any(due(interval, progress) for interval in self._intervals)
        return is_due or progress.iteration in self._also

    @property
    def saved_iteration(self) -> int:
        """The iteration that was saved or loaded last."""
        return self._saved_iteration

    def save_unsaved(self, progress: Progress) -> None:
        """Save, unless this iteration was saved or loaded last."""
        if progress.iteration != self._saved_iteration:
            self._save(progress)
            self._saved_iteration = progress.iteration


def due(interval: int | None, progress: Progress) -> bool:
    """Return whether an action of every `interval` iterations is due; an interval of 0: never."""
    return bool(interval) and progress.iteration % (interval or 1) == 0


def state_of(progress: Progress, engine: Engine) -> dict[str, object]:
    """Return the state that must be equal on every rank before the next step."""
    return progress.to_plain() | {"loss scale": engine.loss_scale}
