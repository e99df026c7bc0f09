"""Losses that are suddenly higher than those before (`--loss-spike-factor`), and going back.

A run goes back by ending: the iterations from its last checkpoint to the spike are recorded in the
--save folder, and the next start passes over them. What a reader would get wrong: the losses that a
spike is compared with are saved with a checkpoint, so that a resumed run judges as one that was
never stopped.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import cast

from megatron import log
from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.checkpoint.files.store import place
from megatron.checkpoint.folder.skips import record_skip, recorded_skips
from megatron.config.run import RunConfig
from megatron.config.training import SpikeAction, TrainingConfig
from megatron.errors import RewindError
from megatron.loop.hooks import CompletedStep
from megatron.mpu.context import ParallelContext
from megatron.progress import Progress

WINDOW = 32  # finite losses that a spike is compared with; with fewer nothing is judged


@dataclass(slots=True)
class RecentLosses:
    """The last finite losses of a run, oldest first; checkpoints keep them."""

    values: deque[float] = field(default_factory=deque)

    def restore(self, values: object) -> None:
        """Take over the losses that a checkpoint has, a list of numbers."""
        self.values = deque(cast("Sequence[float]", values))

    def add(self, loss: float) -> None:
        """Add a loss, unless it is not finite, and forget those beyond `WINDOW`."""
        if math.isfinite(loss):
            self.values.append(loss)
        while len(self.values) > WINDOW:
            self.values.popleft()


def is_spike(loss: float, before: Sequence[float], factor: float) -> bool:
    """Return whether a loss is above `factor` times the median of the `WINDOW` finite ones before.

    One that is not finite is none: --nonfinite-policy decides on it.
    """
    if len(before) < WINDOW or not math.isfinite(loss):
        return False
    return loss > factor * median(before)


class WatchLoss:
    """Look for a spike after each step, and do what --loss-spike-action says.

    Args:
        saved_iteration: of the checkpoint that was saved or loaded last.
    """

    def __init__(
        self,
        config: RunConfig,
        recent: RecentLosses,
        ctx: ParallelContext,
        saved_iteration: Callable[[], int],
    ) -> None:
        self._flags: TrainingConfig = config.training
        self._folder, self._recent, self._ctx = config.checkpoint.save, recent, ctx
        self._saved_iteration = saved_iteration

    def __call__(self, progress: Progress, step: CompletedStep, /) -> Progress:
        """Warn of a spike, or raise RewindError on every rank."""
        factor, loss = self._flags.loss_spike_factor, step.result.loss
        if factor is not None:
            if is_spike(loss, self._recent.values, factor):
                usual = median(self._recent.values)
                self._act(
                    progress,
                    f"loss {loss:.4g} at iteration {progress.iteration}, {usual:.4g} "
                    f"is the median of the {WINDOW} before",
                )
            self._recent.add(loss)
        return progress

    def precedes_next_step(self, progress: Progress) -> bool:
        """Return False: the step that was started meanwhile is not saved."""
        return False

    def _act(self, progress: Progress, found: str) -> None:
        if self._flags.loss_spike_action is SpikeAction.WARN:
            log.warning(f"the loss has spiked: {found}")
            return
        first, last = self._saved_iteration() + 1, progress.iteration
        folder = _folder_on_disk(self._folder)
        assert folder is not None  # noqa: S101  # invariant: refused before training

        def record() -> None:
            if self._ctx.rank == 0:
                record_skip(folder, first, last)

        run_on_all_ranks(self._ctx, "recording the iterations to pass over", record)
        raise RewindError(
            "the loss has spiked, and the run goes back to its last checkpoint",
            found=found,
            fix=f"start the same command again: it passes over the iterations {first} to {last}, "
            f"which stand in {folder} now",
        )


def with_recorded_skips(config: RunConfig, ctx: ParallelContext) -> RunConfig:
    """Return the flags with the iterations that the --save folder names as to be passed over.

    All ranks call this together; the first one reads.
    """
    folder = _folder_on_disk(config.checkpoint.save)
    if folder is None:
        return config

    def read() -> tuple[str, ...]:
        return recorded_skips(folder) if ctx.rank == 0 else ()

    words = run_on_all_ranks(ctx, "reading the iterations to pass over", read)[0]
    if not words:
        return config
    log.info(
        f"{folder} names iterations to pass over, where the loss had spiked: {' '.join(words)}"
    )
    given = config.training.skip_train_iteration_range or ()
    added = tuple(word for word in words if word not in given)
    training = replace(config.training, skip_train_iteration_range=(*given, *added))
    return replace(config, training=training)


def _folder_on_disk(save: str | None) -> Path | None:
    folder = None if save is None else place(save)
    return folder if isinstance(folder, Path) else None
