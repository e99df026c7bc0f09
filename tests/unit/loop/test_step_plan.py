"""The plan of a step depends on the progress alone, and what a step did on its result."""

import pytest

from megatron.config.curriculum import Curriculum, CurriculumSchedule
from megatron.engine.base import StepPlan, StepReport
from megatron.lengths import batch_schedule, duration
from megatron.loop.step_plan import plan_step, progress_after
from megatron.progress import Progress
from tests.support.tiny import tiny_run


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
    length = duration(config, batch_schedule(config, 1))
    plans = {
        seen: plan_step(config, length, Progress(iteration=1, consumed_samples=seen))
        for seen in (4, 0, 16, 4)
    }
    assert plans[0] == StepPlan(2, 4, 0.0, 0.0, 16, 0)
    assert plans[4].learning_rate == pytest.approx(0.005)  # half of the warm-up
    assert plans[16] == StepPlan(4, 8, pytest.approx(0.01 * 32 / 40), pytest.approx(0.16), 16, 16)
    again = plan_step(config, length, Progress(iteration=9, consumed_samples=4))
    assert again == plans[4], "the number of iterations does not matter"


def test_a_plan_has_the_length_that_the_curriculum_gives_its_iteration() -> None:
    config = tiny_run("nowhere")
    length = duration(config, batch_schedule(config, 1))
    discrete = Curriculum(
        schedule=CurriculumSchedule.FIXED_DISCRETE,
        min_length=4,
        max_length=16,
        lengths=(4, 16),
        until=(2,),
    )
    plans = [plan_step(config, length, Progress(iteration=at), discrete) for at in range(4)]
    assert [plan.seq_length for plan in plans] == [4, 4, 16, 16]


def test_the_tables_of_words_go_between_rates_of_their_own_by_the_same_shape() -> None:
    config = tiny_run(
        "nowhere",
        train_samples=48,
        lr_warmup_samples=8,
        lr_decay_style="linear",
        min_lr=0.002,
        decoupled_lr=0.04,
        decoupled_min_lr=0.0,
    )
    length = duration(config, batch_schedule(config, 1))
    rates = {
        seen: plan_step(config, length, Progress(consumed_samples=seen)).rates
        for seen in (0, 4, 8, 28, 48)
    }
    assert [rates[seen].decoupled_learning_rate for seen in rates] == pytest.approx(
        [0.0, 0.02, 0.04, 0.02, 0.0]
    )
    assert [rates[seen].learning_rate for seen in rates] == pytest.approx(
        [0.0, 0.005, 0.01, 0.006, 0.002]
    )
    alone = tiny_run("nowhere", min_lr=0.002, decoupled_lr=0.04).schedule.decoupled
    assert (alone.lr, alone.min_lr, alone.is_decoupled) == (0.04, 0.002, False)


PLAN = StepPlan(2, 8, 0.01, 0.0, 16, 0)


@pytest.mark.parametrize(
    ("result", "skipped", "nonfinite"),
    [
        (StepReport(2.0, 1.0), 0, 0),
        (StepReport(2.0, 1.0, skipped=True), 1, 1),
        (StepReport(2.0, 1.0, skipped=True, overflow=True), 1, 0),
        (None, 1, 0),  # not to be trained on
    ],
)
def test_a_step_consumes_its_batch_whatever_became_of_it(
    result: StepReport | None, skipped: int, nonfinite: int
) -> None:
    assert progress_after(Progress(4, 32, 512), PLAN, result) == Progress(
        5, 40, 640, skipped_iterations=skipped, nonfinite_in_a_row=nonfinite
    )
