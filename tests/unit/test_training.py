"""The loop's own parts: the plan of a step, intervals, the feed of data, and whose words count."""

import dataclasses
import multiprocessing
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megatron.training
from megatron.config.curriculum import Curriculum, CurriculumSchedule
from megatron.data.worker_budget import WorkerLoad
from megatron.engine.base import DatasetRequest, Datasets, EvaluationSum, StepPlan
from megatron.errors import DataError
from megatron.preflight.lengths import batch_schedule, duration
from megatron.progress import Progress
from megatron.training import DataFeed, due, plan_step, pretrain, state_of
from pretrain_gpt import gpt_task
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run, train, train_all, write_tiny_corpus
from tests.unit.engine.engines import runtime_of, tiny_engine


def test_a_plan_depends_on_the_progress_alone() -> None:
    config = tiny_run(
        "nowhere",
        rampup_batch_size=(4, 4, 16),
        train_samples=48,
        micro_batch_size=2,
        lr_warmup_samples=8,
        lr_decay_style="linear",
        weight_decay_incr_style="linear",
        start_weight_decay=0.0,
        end_weight_decay=0.48,
    )
    batches = batch_schedule(config.training, 1)
    length = duration(config, batches)
    plans = {
        seen: plan_step(config, batches, length, Progress(iteration=1, consumed_samples=seen))
        for seen in (4, 0, 16, 4)
    }
    assert plans[0] == StepPlan(2, 4, 0.0, 0.0, 16)
    assert plans[4].learning_rate == pytest.approx(0.005)  # half of the warm-up
    assert plans[16] == StepPlan(4, 8, pytest.approx(0.01 * 32 / 40), pytest.approx(0.16), 16)
    again = plan_step(config, batches, length, Progress(iteration=9, consumed_samples=4))
    assert again == plans[4], "the number of iterations does not matter"


def test_a_plan_has_the_length_that_the_curriculum_gives_its_iteration() -> None:
    config = tiny_run("nowhere")
    batches = batch_schedule(config.training, 1)
    length = duration(config, batches)
    discrete = Curriculum(
        schedule=CurriculumSchedule.FIXED_DISCRETE,
        min_length=4,
        max_length=16,
        lengths=(4, 16),
        until=(2,),
    )
    plans = [
        plan_step(config, batches, length, Progress(iteration=at), discrete) for at in range(4)
    ]
    assert [plan.seq_length for plan in plans] == [4, 4, 16, 16]


@pytest.mark.parametrize(
    ("interval", "iteration", "expected"),
    [(None, 4, False), (0, 4, False), (2, 4, True), (3, 4, False), (1, 1, True)],
)
def test_what_is_due(interval: int | None, iteration: int, expected: bool) -> None:
    assert due(interval, Progress(iteration=iteration)) is expected


def test_the_state_that_ranks_compare_is_what_decides_the_next_step() -> None:
    state = state_of(Progress(iteration=3, consumed_samples=24), tiny_engine(fp16=True))
    assert state["loss scale"] == 2.0**32
    assert (state["iteration"], state["consumed_samples"]) == (3, 24)
    assert "nonfinite_in_a_row" in state


class Numbers:
    """Samples that say their own number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": np.full(17, index, dtype=np.int64)}


def feed_of(*, count: int = 10, consumed: int = 0, take: int, **flags: Any) -> list[list[int]]:
    config = tiny_run("nowhere", micro_batch_size=2, **flags)
    task = dataclasses.replace(gpt_task(), datasets=lambda _: Datasets(Numbers(count), None, None))
    batches = batch_schedule(config.training, 1)
    feed = DataFeed(task, runtime_of(config), batches, duration(config, batches))
    iterator = feed.training(Progress(consumed_samples=consumed))
    taken = [next(iterator)["text"][:, 0].tolist() for _ in range(take)]
    feed.close()
    return taken


def test_a_cyclic_feed_goes_on_for_epochs_and_can_be_picked_up_anywhere() -> None:
    whole = feed_of(take=15, dataloader_type="cyclic")
    epochs = [sorted(chain.from_iterable(whole[at : at + 5])) for at in (0, 5, 10)]
    assert epochs == [list(range(10))] * 3
    assert whole[:5] != whole[5:10], "each epoch has an order of its own"
    for taken in range(15):
        rest = feed_of(take=15 - taken, consumed=2 * taken, dataloader_type="cyclic")
        assert rest == whole[taken:]


def test_a_feed_in_order_ends_with_its_index_and_says_so() -> None:
    assert feed_of(count=40, take=5) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    with pytest.raises(DataError, match="the data ended before the run did"):
        feed_of(count=40, take=21)


def test_data_too_short_for_the_run_is_refused_before_the_first_step() -> None:
    with pytest.raises(DataError, match="holds fewer samples than the run takes") as raised:
        feed_of(count=39, take=1)
    assert "39 samples, read once in order; the run takes 40" in str(raised.value)
    assert len(feed_of(count=39, take=1, dataloader_type="cyclic")) == 1


def test_validation_data_in_order_starts_over_where_it_ends() -> None:
    config = tiny_run("nowhere", micro_batch_size=2, global_batch_size=2, eval_iters=2)
    splits = Datasets(Numbers(2), Numbers(7), None)
    task = dataclasses.replace(gpt_task(), datasets=lambda _: splits)
    batches = batch_schedule(config.training, 1)
    engine = Listening()
    for consumed in (0, 4):  # the second as after a resume
        progress = Progress(consumed_valid_samples=consumed)
        feed = DataFeed(task, runtime_of(config), batches, duration(config, batches))
        for _ in range(2):
            progress = feed.validate(engine, progress, SILENT)  # type: ignore[arg-type]
        assert progress.consumed_valid_samples == consumed + 8
    # Sample 6 fills no step. Two evaluations from 0, then two from where the first of them ended.
    assert engine.heard == [[0, 1], [2, 3], [4, 5], [0, 1], [4, 5], [0, 1], [2, 3], [4, 5]]


def test_each_named_group_is_evaluated_alone_and_they_advance_alike() -> None:
    config = tiny_run("nowhere", micro_batch_size=2, global_batch_size=2, eval_iters=1)
    splits = Datasets(Numbers(2), {"V": Numbers(4), "W": Numbers(6)}, {"X": Numbers(2)})
    task = dataclasses.replace(gpt_task(), datasets=lambda _: splits)
    batches = batch_schedule(config.training, 1)
    engine, said = Listening(), Silent()
    progress = Progress()
    for _ in range(2):  # the second as after a resume
        feed = DataFeed(task, runtime_of(config), batches, duration(config, batches))
        progress = feed.validate(engine, progress, said)  # type: ignore[arg-type]
        progress = feed.validate(engine, progress, said)  # type: ignore[arg-type]
    feed.test(engine, progress, said)  # type: ignore[arg-type]
    assert progress.consumed_valid_samples == 8
    assert said.names == ["V", "W"] * 4 + ["X"]
    v, w = engine.heard[:8:2], engine.heard[1:8:2]
    assert v == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert w == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert engine.heard[8:] == [[0, 1]]


def test_workers_of_all_loaders_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[WorkerLoad] = []
    monkeypatch.setattr(megatron.training, "announce_worker_budget", seen.append)
    config = tiny_run("nowhere", micro_batch_size=2, num_workers=3)
    batches = batch_schedule(config.training, 1)
    splits = Datasets(Numbers(2), {"V": Numbers(2), "W": Numbers(2)}, None)
    task = dataclasses.replace(gpt_task(), datasets=lambda _: splits)
    DataFeed(task, runtime_of(config), batches, duration(config, batches))
    assert seen == [WorkerLoad(num_workers=3, loaders=3, readers=1, batch_bytes=2 * 17 * 8)]


def test_files_of_every_group_are_watched() -> None:
    class Changed(Numbers):
        def check_unchanged(self) -> None:
            raise DataError("changed", fix="do not")

    class Same(Numbers):
        def check_unchanged(self) -> None:
            pass

    config = tiny_run("nowhere", micro_batch_size=2)
    batches = batch_schedule(config.training, 1)
    for last in (Same, Changed):
        splits = Datasets(Same(2), {"V": Same(2), "W": last(2)}, None)
        task = dataclasses.replace(gpt_task(), datasets=lambda _, splits=splits: splits)
        feed = DataFeed(task, runtime_of(config), batches, duration(config, batches))
        if last is Same:
            feed.check_unchanged()
        else:
            with pytest.raises(DataError, match="changed"):
                feed.check_unchanged()


class Listening:
    """An engine that only writes down what it is to evaluate on."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []

    def evaluate(self, batches: Iterator[Any], num_microbatches: int) -> EvaluationSum:
        self.heard += [next(batches)["text"][:, 0].tolist() for _ in range(num_microbatches)]
        return EvaluationSum(1.0, 1)


class Silent:
    """A log that says nothing, and remembers of what."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def evaluation(self, name: str, *args: Any) -> None:
        self.names.append(name)


SILENT = Silent()


def test_the_request_says_what_the_run_needs() -> None:
    asked: list[DatasetRequest] = []

    def note(request: DatasetRequest) -> Datasets:
        asked.append(request)
        return Datasets(Numbers(1), None, None)

    config = tiny_run("nowhere", train_iters=6, eval_iters=2, eval_interval=4, seed=7)
    batches = batch_schedule(config.training, 1)
    task = dataclasses.replace(gpt_task(), datasets=note)
    DataFeed(task, runtime_of(config), batches, duration(config, batches))
    assert asked[0].num_samples == (48, 2 * 16, 16)
    assert (asked[0].min_samples, asked[0].seed, asked[0].is_builder) == (8, 7, True)


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
    config = tiny_run(corpus, num_workers=1, eval_iters=1, eval_interval=2, save=save)
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
