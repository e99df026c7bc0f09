"""The loop calls each of its checks: a rank that differs ends the run at the right step."""

import dataclasses
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.engine.base import EvaluationSum, PendingReport
from megatron.engine.native import NativeEngine
from megatron.errors import MegatronError
from megatron.initialize import shutdown_megatron
from megatron.loop import report
from megatron.model.accounting import flops_per_token
from tests.support.loop_faults import (
    counted_steps,
    other_loss_scale,
    other_weights,
    own_disk,
    skipped_sample,
)
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run, train, write_tiny_corpus

RANKS = 2
PADDED_VOCABULARY = 52  # 50 tokens and the end of document, in multiples of 4
EVALUATION_S = 1000.0
SAVED_AT, SLOW_STEP_S = 40, 0.1  # a save takes a few milliseconds
FLOAT32 = 1e-6  # TensorBoard keeps float32


class Ended(NamedTuple):
    """How many steps a run did, and what ended it."""

    steps: int
    error: str


@contextmanager
def loss_not_finite(*, after: int) -> Iterator[None]:
    """While inside, the step after so many returns a loss that is not a number."""
    start_step, done = NativeEngine.start_step, 0

    def broken(self: NativeEngine, *args: Any) -> PendingReport:
        nonlocal done
        done += 1
        result = start_step(self, *args)
        if done != after:
            return result
        return lambda: dataclasses.replace(result(), loss=math.nan)

    with patch.object(NativeEngine, "start_step", broken):
        yield


@contextmanager
def corpus_grows(corpus: str, *, after: int) -> Iterator[None]:
    """While inside, rank 0 appends to the corpus after so many steps."""
    start_step, done = NativeEngine.start_step, 0

    def then_appended(self: NativeEngine, *args: Any) -> PendingReport:
        nonlocal done
        done += 1
        result = start_step(self, *args)
        if done == after:
            if dist.get_rank() == 0:
                with open(f"{corpus}.bin", "ab") as file:
                    file.write(b"more")
            dist.barrier()
        return result

    with patch.object(NativeEngine, "start_step", then_appended):
        yield


def runs_with_faults(corpus: str, folder: str) -> dict[str, Ended]:
    save, never = str(Path(folder) / "save"), {"check_agreement_interval": 0}
    growing = str(Path(folder) / "growing")
    if dist.get_rank() == 0:
        for end in (".bin", ".idx"):
            shutil.copy(corpus + end, growing + end)
    dist.barrier()
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "none": (nullcontext(), {"check_agreement_interval": 2}),
        "loss scale at the start": (other_loss_scale(after=0), never),
        "loss scale later, not compared": (other_loss_scale(after=1), never),
        "loss scale later": (other_loss_scale(after=1), {"check_agreement_interval": 2}),
        "weights": (other_weights(after=1), {"save": save, "save_interval": 3}),
        "loss": (loss_not_finite(after=2), {}),
        "samples": (skipped_sample(after=4), {"check_agreement_interval": 2}),
        "samples, compared by a save": (
            skipped_sample(after=0),
            {"save": save, "save_interval": 1, **never},
        ),
        "disks": (own_disk(Path(folder)), {"save": "save"}),
        "corpus": (
            corpus_grows(growing, after=1),
            {"data_path": (growing,), "check_agreement_interval": 2},
        ),
    }
    found = {}
    for name, (fault, flags) in cases.items():
        with counted_steps() as steps, fault:
            try:
                train(tiny_run(corpus, train_iters=5, **flags))
                found[name] = Ended(steps.done, "")
            except MegatronError as error:
                shutdown_megatron()
                found[name] = Ended(steps.done, str(error))
    return found


def test_what_differs_between_ranks_ends_the_run_at_the_step_where_it_is_compared(
    tmp_path: Path,
) -> None:
    corpus = write_tiny_corpus(tmp_path / "corpus")
    expected = {
        "none": (5, ""),
        "loss scale at the start": (0, "the ranks are no longer in lockstep"),
        "loss scale later, not compared": (5, ""),
        "loss scale later": (2, "loss scale: 1.0 on rank 0, 2.0 on rank 1"),
        "weights": (3, "replicas"),
        # It is read while the third step runs, and nothing is saved in between.
        "loss": (3, "the loss or the gradient is not finite"),
        # Four micro-batches of each step are rank 1's; those of the second step are one further.
        "samples": (2, "rank 1 drew 8 samples (1 to 16), planned were 8 samples (1 to 15)"),
        "samples, compared by a save": (1, "the ranks did not draw the samples of the plan"),
        "disks": (0, "the nodes do not see one folder for checkpoints"),
        "corpus": (2, "growing"),
    }
    for found in run_on_ranks(RANKS, runs_with_faults, corpus, str(tmp_path)):
        assert found.keys() == expected.keys()
        for name, (steps, words) in expected.items():
            assert found[name].steps == steps, f"{name}: {found[name]}"
            assert words in found[name].error, f"{name}: {found[name]}"
            assert bool(words) == bool(found[name].error), f"{name}: {found[name]}"
    assert not list((tmp_path / "save").glob("iter_*"))


def train_with_tensorboard(corpus: str, folder: str) -> None:
    """Train with evaluations that take a thousand seconds by the clock of the step log."""
    evaluated_s, evaluate = 0.0, NativeEngine.evaluate

    def slow(self: NativeEngine, *args: Any) -> EvaluationSum:
        nonlocal evaluated_s
        evaluated_s += EVALUATION_S
        return evaluate(self, *args)

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + evaluated_s)
    logged = {
        "log_interval": 1,
        "tensorboard_dir": folder,
        "log_timers_to_tensorboard": True,
        "peak_tflops": 1.0,
    }
    evaluations = {"eval_at_start": True, "eval_iters": 1, "eval_interval": 1}
    with patch.object(NativeEngine, "evaluate", slow), patch.object(report, "time", clock):
        train(tiny_run(corpus, **logged, **evaluations))


def test_throughput_is_that_of_the_global_batch(tmp_path: Path) -> None:
    corpus, folder = write_tiny_corpus(tmp_path / "corpus"), tmp_path / "events"
    run_on_ranks(RANKS, train_with_tensorboard, corpus, str(folder))
    events = EventAccumulator(str(folder)).Reload()
    seconds, samples, tokens, tflops, mfu = (
        [event.value for event in events.Scalars(f"iteration-time/{name}")]
        for name in (
            "iteration-time",
            "samples per second",
            "tokens per second",
            "TFLOPs per gpu (estimated)",
            "MFU",
        )
    )
    config = tiny_run(corpus)
    size, length = config.training.global_batch_size, config.data.seq_length
    flops = flops_per_token(config.model, PADDED_VOCABULARY, length).model
    assert len(seconds) == config.training.train_iters
    assert max(seconds) < EVALUATION_S / 2, "evaluations are counted"
    for at, interval in enumerate(seconds):
        assert samples[at] * interval == pytest.approx(size, rel=FLOAT32)
        assert tokens[at] * interval == pytest.approx(size * length, rel=FLOAT32)
        assert tflops[at] == pytest.approx(tokens[at] * flops / RANKS / 1e12, rel=FLOAT32)
        assert mfu[at] == pytest.approx(tflops[at], rel=FLOAT32)


def step_before_which_the_save_is_in_place(corpus: str, folder: str) -> int | None:
    """Train with one save beside the training, after half of the steps; the last is not saved."""
    start_step, seen, done = NativeEngine.start_step, list[int](), 0

    def looked(self: NativeEngine, *args: Any) -> PendingReport:
        nonlocal done
        done += 1
        if not seen and list(Path(folder).glob("iter_*/manifest.json")):
            seen.append(done)
        if done > SAVED_AT and not seen:
            time.sleep(SLOW_STEP_S)
        return start_step(self, *args)

    flags = {"train_iters": 2 * SAVED_AT, "save_interval": SAVED_AT, "async_save": True}
    with patch.object(NativeEngine, "start_step", looked):
        train(tiny_run(corpus, save=folder, **flags))
    return seen[0] if seen else None


def test_a_save_beside_the_training_is_put_in_place_while_it_goes_on(tmp_path: Path) -> None:
    corpus, folder = write_tiny_corpus(tmp_path / "corpus"), tmp_path / "save"
    (seen,) = run_on_ranks(1, step_before_which_the_save_is_in_place, corpus, str(folder))
    assert seen is not None
    assert seen > SAVED_AT
