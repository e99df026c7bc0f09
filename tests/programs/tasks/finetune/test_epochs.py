"""Every epoch reads each example once, and the best epoch is the one that is saved."""

import pytest
import torch

from megatron.config.training import TrainingConfig
from megatron.engine.base import StepPlan, StepReport
from megatron.loop.hooks import CompletedStep
from megatron.mpu.context import Group
from megatron.progress import Progress
from tasks.finetune.epochs import EpochBatches, JudgeEpochs
from tasks.finetune.examples import ClassificationQuestion
from tasks.finetune.judging import EvaluationResult
from tasks.finetune.rows import UNKNOWN
from tests.programs.tasks.finetune.test_judging import rows_of

EXAMPLES, BATCH, PER_EPOCH = 5, 4, 2
PLAN = StepPlan(2, BATCH, 0.01, 0.0, 1, 0)
TRAINING = TrainingConfig(micro_batch_size=1, train_iters=1, seed=3)


def batches_of(replica: int) -> EpochBatches:
    rows = rows_of(EXAMPLES)
    return EpochBatches(rows, TRAINING, Group((0, 1), replica), global_batch_size=BATCH)


def test_replicas_together_read_each_example_once_in_an_epoch() -> None:
    orders = []
    for epoch in range(2):
        read = []
        for at in range(PER_EPOCH):
            for replica in (0, 1):
                batches = batches_of(replica)
                assert batches.per_epoch == PER_EPOCH
                for raw in batches(PLAN, Progress(epoch * PER_EPOCH + at)):
                    known = raw["labels"] != UNKNOWN
                    read += raw["text"].flatten()[known].tolist()
        assert sorted(read) == list(range(EXAMPLES))
        orders.append(read)
    assert orders[0] != orders[1]


def test_a_run_reads_the_same_from_any_iteration_on() -> None:
    straight, resumed = batches_of(0), batches_of(0)
    expected = [straight.examples_of(at) for at in range(6)]
    assert [resumed.examples_of(at) for at in (3, 4, 5)] == expected[3:]


def test_the_best_epoch_is_saved_and_losses_are_means_over_examples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scores, saved = iter([0.5, 0.75, 0.75, 0.25]), []
    rows = rows_of(EXAMPLES)
    judging = JudgeEpochs(
        ClassificationQuestion(("no", "yes")),
        rows,
        (),
        batches_of(0),
        4,
        lambda _: EvaluationResult(torch.zeros(EXAMPLES, 2), {"accuracy": next(scores)}),
        lambda progress: saved.append(progress.iteration),
    )
    for iteration in range(1, 4 * PER_EPOCH + 1):
        loss = 1.0 if iteration % PER_EPOCH else 6.0  # the last batch has one example of five
        step = CompletedStep(PLAN, StepReport(loss, 1.0))
        progress = Progress(iteration)
        assert judging(progress, step) == progress
    assert saved == [PER_EPOCH, 2 * PER_EPOCH]
    assert (judging.best_epoch, judging.best and judging.best.metrics) == (2, {"accuracy": 0.75})
    assert judging.losses == (2.0,) * 4
    assert " epoch 2/4 | training loss: 2.0000E+00 | accuracy: 0.7500 |" in capsys.readouterr().out
