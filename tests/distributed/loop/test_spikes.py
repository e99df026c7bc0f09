"""A run that goes back from a spike is the run that had passed over its data, bit for bit."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from megatron.engine.base import PendingReport, StepPlan
from megatron.engine.native import NativeEngine
from megatron.errors import RewindError
from megatron.initialize import shutdown_megatron
from megatron.loop import spikes
from tests.support.ranks import run_on_ranks
from tests.support.tiny import Record, assert_same_bits, tiny_run, train, write_tiny_corpus

SAVED_AT, SPIKE_AT, ITERATIONS = 5, 7, 11
WINDOW = 6  # of which five are in the checkpoint
SAMPLES = 8  # of an iteration


@contextmanager
def poisoned() -> Iterator[None]:
    """While inside, the loss of the samples of one iteration is ten times as high."""
    start_step = NativeEngine.start_step

    def reported(self: NativeEngine, batches: Any, plan: StepPlan, *args: Any) -> PendingReport:
        report = start_step(self, batches, plan, *args)
        if plan.first_sample != SAMPLES * (SPIKE_AT - 1):
            return report

        def high() -> Any:
            return dataclasses.replace(report(), loss=10 * report().loss)

        return high

    with patch.object(NativeEngine, "start_step", reported), patch.object(spikes, "WINDOW", WINDOW):
        yield


def goes_back(corpus: str, folder: str) -> tuple[str, Record, Record]:
    own, other = str(Path(folder) / "own"), str(Path(folder) / "other")
    watched: dict[str, Any] = {
        "train_iters": ITERATIONS,
        "save_interval": 100,
        "loss_spike_factor": 3.0,
        "loss_spike_action": "rewind",
        "hidden_dropout": 0.1,
    }
    with poisoned():
        train(tiny_run(corpus, save=own, load=own, exit_interval=SAVED_AT, **watched))
        try:
            train(tiny_run(corpus, save=own, load=own, **watched))
            message = ""
        except RewindError as error:
            shutdown_megatron()
            message = str(error)
        again = train(tiny_run(corpus, save=own, load=own, **watched))
        skips = {"skip_train_iteration_range": (f"{SAVED_AT + 1}-{SPIKE_AT}",)}
        never = train(tiny_run(corpus, save=other, load=other, **watched, **skips))
    dist.barrier()
    return message, again, never


def test_a_run_that_goes_back_is_one_that_passed_over_the_iterations(tmp_path: Path) -> None:
    corpus = write_tiny_corpus(tmp_path / "corpus")
    for message, again, never in run_on_ranks(2, goes_back, corpus, str(tmp_path)):
        # The window was full only with the losses that came with the checkpoint.
        assert f"at iteration {SPIKE_AT}" in message
        assert f"passes over the iterations {SAVED_AT + 1} to {SPIKE_AT}" in message
        assert len(again.losses) == ITERATIONS - SPIKE_AT
        assert (again.progress, again.progress.iteration) == (never.progress, ITERATIONS)
        assert_same_bits(again, dataclasses.replace(never, steps=never.steps[SAVED_AT:]))
