"""When a run ends: its length, an interval, a clock, a signal or a file, agreed over all ranks.

Signals, files and clocks differ between ranks. They are reduced to one decision before any rank
acts on it, so that no rank saves while another trains on. While a step runs, they travel with its
scalars; ranks ask each other for nothing else.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch

from megatron import device
from megatron.config.training import TrainingConfig
from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import Group
from megatron.progress import Duration, Progress

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # of launchers; Slurm sends the second ahead of time


class StopConditions:
    """The reasons to end a run, checked before each step in a fixed order."""

    def __init__(self, config: TrainingConfig, duration: Duration, world: Group) -> None:
        self._config, self._duration, self._world = config, duration, world
        self._started = time.monotonic()
        self._received: set[int] = set()

    def reason(
        self, progress: Progress, *, steps_done: int, signals: Sequence[bool] | None = None
    ) -> str | None:
        """Return why to end the run now, the same text on every rank; None to continue.

        Args:
            steps_done: iterations of this process, which --exit-interval needs one of.
            signals: what of `signals` holds on any rank; None: reduce them now, which waits for the
                device.
        """
        if self._duration.is_done(progress):
            return f"training is complete at iteration {progress.iteration}"
        interval = self._config.exit_interval
        if interval is not None and steps_done and progress.iteration % interval == 0:
            return f"exiting program at iteration {progress.iteration}"
        agreed = self._agreed() if signals is None else signals
        return next((reason for reason, holds in zip(self._reasons(), agreed) if holds), None)

    def signals(self) -> tuple[bool, ...]:
        """Return what holds on this rank: signals were received, a file is there, time is up."""
        limit, path = self._config.exit_duration_in_mins, self._config.kill_switch_path
        minutes = (time.monotonic() - self._started) / 60
        return (
            *(number in self._received for number in _SIGNALS),
            path is not None and os.path.exists(path),
            limit is not None and minutes > limit,
        )

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turn SIGTERM and SIGUSR1 into a checkpoint and an orderly end inside the block."""
        if not self._config.exit_signal_handler:
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received.add(number)

    def _reasons(self) -> tuple[str, ...]:
        """Return the reason to end the run for each of `signals`."""
        return (
            *(f"{number.name} was received; exiting program" for number in _SIGNALS),
            f"Detected kill switch at {self._config.kill_switch_path}. Exiting",
            f"exiting program after {self._config.exit_duration_in_mins} minutes",
        )

    def _agreed(self) -> tuple[bool, ...]:
        flags = torch.tensor(list(map(float, self.signals())), device=device.current())
        return tuple(map(bool, all_reduce(flags, self._world, op="max").tolist()))
