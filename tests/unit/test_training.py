"""Pretraining in one process: whose providers count, intervals, stops and saves."""

import dataclasses
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

import megatron.training
from megatron.engine.base import DatasetRequest, Datasets
from megatron.progress import Progress
from megatron.training import pretrain
from pretrain_gpt import gpt_task
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run, train, train_all, write_tiny_corpus

pytestmark = pytest.mark.slow


def test_providers_by_name_win_over_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(megatron.training, "initialize_megatron", lambda *a, **k: "runtime")
    monkeypatch.setattr(megatron.training, "shutdown_megatron", lambda: given.append("shutdown"))
    monkeypatch.setattr(megatron.training, "run", lambda task, runtime: given.append(task))
    task = gpt_task()

    def datasets(request: DatasetRequest) -> Datasets:
        raise NotImplementedError

    def layers(*args: Any) -> Any:
        raise NotImplementedError

    pretrain(task, train_valid_test_datasets_provider=datasets, model_provider=layers)
    pretrain(task)
    assert given[0] == dataclasses.replace(task, datasets=datasets, layers=layers)
    assert given[2] is task
    assert given[1] == given[3] == "shutdown"


def two_runs_and_their_workers(corpus: str, save: str) -> tuple[list[Any], int]:
    config = tiny_run(
        corpus, train_iters=5, num_workers=1, eval_iters=1, eval_interval=2, save=save
    )
    return [train(config), train(config)], len(multiprocessing.active_children())


def test_a_process_trains_twice_alike_and_leaves_no_workers(tmp_path: Path) -> None:
    corpus = write_tiny_corpus(tmp_path / "corpus")
    ((one, other), workers) = run_on_ranks(
        1, two_runs_and_their_workers, corpus, str(tmp_path / "run")
    )[0]
    assert repr(one.steps) == repr(other.steps)
    assert one.trained_on == other.trained_on
    assert one.progress == other.progress == Progress(5, 40, 640, 3 * 8)
    assert workers == 0


def test_intervals_stop_save_and_evaluate(tmp_path: Path) -> None:
    corpus = write_tiny_corpus(tmp_path / "corpus")
    run = tmp_path / "run"
    configs = [
        tiny_run(
            corpus,
            save=str(run),
            load=str(run),
            train_iters=5,
            save_interval=2,
            exit_interval=3,
            eval_iters=1,
            eval_interval=2,
            check_agreement_interval=1,
            log_params_norm=True,
        )
    ] * 3
    first, second, third = run_on_ranks(1, train_all, configs)[0]
    assert [record.progress.iteration for record in (first, second, third)] == [3, 5, 5]
    assert [len(record.steps) for record in (first, second, third)] == [3, 2, 0]
    # After 2; after 4, at the end, and the test; a run that was complete does nothing again.
    assert [len(r.evaluations) for r in (first, second, third)] == [1, 3, 0]
    assert sorted(path.name for path in run.glob("iter_*")) == [
        "iter_0000002",
        "iter_0000003",
        "iter_0000004",
        "iter_0000005",
    ]
