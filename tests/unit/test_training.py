"""The loop's own parts: the plan of a step, intervals, and whose words count."""

import dataclasses
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

import megatron.training
from megatron.config.curriculum import Curriculum, CurriculumSchedule
from megatron.engine.base import DatasetRequest, Datasets, StepPlan
from megatron.lengths import batch_schedule, duration
from megatron.mpu.context import Group
from megatron.progress import Progress
from megatron.training import due, plan_step, pretrain, state_of
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


@pytest.mark.parametrize(("ranks_here", "asked"), [(1, ["runs/a"]), (2, [])])
def test_several_nodes_have_to_see_one_folder_before_they_train(
    ranks_here: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(
        megatron.training, "refuse_separate_disks", lambda folder, ctx: looked.append(folder)
    )
    monkeypatch.setattr(megatron.training, "data_sources", lambda data: {})
    monkeypatch.setattr(megatron.training, "agree_on_data", lambda sources, world: None)
    monkeypatch.setattr(megatron.training, "announce_shared_corpora", lambda data, sources: None)
    for save in ("runs/a", None):
        runtime = runtime_of(tiny_run("nowhere", save=save))
        context = dataclasses.replace(runtime.context, world=Group((0, 1), 0))
        launch = dataclasses.replace(runtime.launch, world_size=2, local_world_size=ranks_here)
        there = dataclasses.replace(runtime, context=context, launch=launch)
        megatron.training._agree_on_files(there.config, there)
    assert looked == asked


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
