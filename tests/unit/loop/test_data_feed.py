"""The feed of data: which samples come next, when it ends, and which groups it evaluates on."""

import dataclasses
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest

from megatron.config.run import RunConfig
from megatron.data.loading.worker_budget import WorkerLoad
from megatron.engine.base import DatasetRequest, Datasets, EvaluationSum, PretrainTask
from megatron.errors import DataError
from megatron.initialize import tokenizer_of
from megatron.launch import Launch
from megatron.lengths import batch_schedule, duration
from megatron.loop import data_feed
from megatron.loop.data_feed import DataFeed
from megatron.mpu.context import ParallelContext
from megatron.peers.activity import Activity
from megatron.progress import Progress
from pretrain_gpt import gpt_task
from tests.support.tiny import tiny_run


class Numbers:
    """Samples that hold their own number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": np.full(17, index, dtype=np.int64)}


def made(task: PretrainTask, config: RunConfig) -> DataFeed:
    """The feed of a run on this process alone."""
    return DataFeed(
        task,
        config,
        ParallelContext.single(),
        Launch(),
        tokenizer_of(config),
        duration(config, batch_schedule(config, 1)),
        Activity(),
    )


def feed_of(*, count: int = 10, consumed: int = 0, take: int, **flags: Any) -> list[list[int]]:
    config = tiny_run("nowhere", micro_batch_size=2, train_iters=5, **flags)
    task = dataclasses.replace(gpt_task(), datasets=lambda _: Datasets(Numbers(count), None, None))
    feed = made(task, config)
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
    engine = Listening()
    for consumed in (0, 4):  # the second as after a resume
        progress = Progress(consumed_valid_samples=consumed)
        feed = made(task, config)
        for _ in range(2):
            progress = feed.validate(engine, progress, SILENT)  # type: ignore[arg-type]
        assert progress.consumed_valid_samples == consumed + 8
    # Sample 6 fills no step. Two evaluations from 0, then two from where the first of them ended.
    assert engine.heard == [[0, 1], [2, 3], [4, 5], [0, 1], [4, 5], [0, 1], [2, 3], [4, 5]]


def test_each_named_group_is_evaluated_alone_and_they_advance_alike() -> None:
    config = tiny_run("nowhere", micro_batch_size=2, global_batch_size=2, eval_iters=1)
    splits = Datasets(Numbers(2), {"V": Numbers(4), "W": Numbers(6)}, {"X": Numbers(2)})
    task = dataclasses.replace(gpt_task(), datasets=lambda _: splits)
    engine, silent = Listening(), Silent()
    progress = Progress()
    for _ in range(2):  # the second as after a resume
        feed = made(task, config)
        progress = feed.validate(engine, progress, silent)  # type: ignore[arg-type]
        progress = feed.validate(engine, progress, silent)  # type: ignore[arg-type]
    feed.test(engine, progress, silent)  # type: ignore[arg-type]
    assert progress.consumed_valid_samples == 8
    assert silent.names == ["V", "W"] * 4 + ["X"]
    v, w = engine.heard[:8:2], engine.heard[1:8:2]
    assert v == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert w == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert engine.heard[8:] == [[0, 1]]


def test_workers_of_all_loaders_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[WorkerLoad] = []
    monkeypatch.setattr(data_feed, "announce_worker_budget", seen.append)
    config = tiny_run("nowhere", micro_batch_size=2, num_workers=3)
    splits = Datasets(Numbers(2), {"V": Numbers(2), "W": Numbers(2)}, None)
    task = dataclasses.replace(gpt_task(), datasets=lambda _: splits)
    made(task, config)
    assert seen == [WorkerLoad(num_workers=3, loaders=3, readers=1, batch_bytes=2 * 17 * 8)]


@pytest.mark.parametrize(("kind", "workers"), [("cyclic", 0), ("cyclic", 1), ("single", 0)])
def test_what_a_feed_draws_is_what_was_planned(kind: str, workers: int) -> None:
    config = tiny_run(
        "nowhere", micro_batch_size=2, train_iters=5, dataloader_type=kind, num_workers=workers
    )
    task = dataclasses.replace(
        gpt_task(), datasets=lambda _: Datasets(Numbers(46 if kind == "single" else 9), None, None)
    )
    feed, consumed = made(task, config), 6
    feed.agree_on_samples(Progress(consumed_samples=consumed))  # before there is a training
    batches = feed.training(Progress(consumed_samples=consumed))
    feed.agree_on_samples(Progress(consumed_samples=consumed))
    for count in (1, 3, 11):  # the last one: more than two epochs of the cyclic order
        for _ in range(count):
            next(batches)
        consumed += 2 * count
        feed.agree_on_samples(Progress(consumed_samples=consumed))
    next(batches)
    with pytest.raises(DataError, match=r"rank 0 drew 2 samples .*, planned were 4 samples"):
        feed.agree_on_samples(Progress(consumed_samples=consumed + 4))
    feed.close()


def test_files_of_every_group_are_watched() -> None:
    class Changed(Numbers):
        def check_unchanged(self) -> None:
            raise DataError("changed", fix="do not")

    class Same(Numbers):
        def check_unchanged(self) -> None:
            pass

    config = tiny_run("nowhere", micro_batch_size=2)
    for last in (Same, Changed):
        splits = Datasets(Same(2), {"V": Same(2), "W": last(2)}, None)
        task = dataclasses.replace(gpt_task(), datasets=lambda _, splits=splits: splits)
        feed = made(task, config)
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
    """A log that prints nothing, and records the names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def evaluation(self, name: str, *args: Any) -> None:
        self.names.append(name)


SILENT = Silent()


def test_the_request_says_what_the_run_needs() -> None:
    requests: list[DatasetRequest] = []

    def note(request: DatasetRequest) -> Datasets:
        requests.append(request)
        return Datasets(Numbers(1), None, None)

    config = tiny_run("nowhere", train_iters=6, eval_iters=2, eval_interval=4, seed=7)
    task = dataclasses.replace(gpt_task(), datasets=note)
    made(task, config)
    assert requests[0].num_samples == (48, 2 * 16, 16)
    assert (requests[0].min_samples, requests[0].seed, requests[0].is_builder) == (8, 7, True)
