"""Iterations that are passed over, and runs that only evaluate, change nothing but the position."""

from pathlib import Path

import pytest
import torch

from megatron.errors import ConfigError
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run, train_all, whole, write_tiny_corpus

EACH = {"train_iters": 6, "eval_iters": 1, "eval_interval": 6}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def test_what_is_skipped_is_read_and_not_trained_on(corpus: str) -> None:
    full = tiny_run(corpus, **EACH)
    skipping = tiny_run(corpus, **EACH, skip_train_iteration_range=("2-2", "4-5"))
    by_rank = run_on_ranks(2, train_all, [full, skipping])
    for every, some in by_rank:
        per_iteration = len(every.trained_on) // 6
        kept = [
            at for at in (0, 2, 5) for at in range(at * per_iteration, (at + 1) * per_iteration)
        ]
        assert some.trained_on == [every.trained_on[at] for at in kept]
        assert some.progress.iteration == every.progress.iteration == 6
        assert some.progress.consumed_samples == every.progress.consumed_samples
        assert some.progress.skipped_iterations == 3
        # The schedule goes on by samples, as if they had been trained on.
        assert [plan.learning_rate for plan in some.plans] == [
            every.plans[at].learning_rate for at in (0, 2, 5)
        ]
        assert some.losses[0] == every.losses[0]


def test_a_run_that_only_evaluates_leaves_everything_as_it_was(corpus: str, tmp_path: Path) -> None:
    save = str(tmp_path / "save")
    trained = tiny_run(corpus, **EACH, save=save)
    again = tiny_run(corpus, **EACH, load=save, eval_only=True, save=str(tmp_path / "other"))
    by_rank = run_on_ranks(2, train_all, [trained, again])
    before, after = (whole([records[at] for records in by_rank]) for at in (0, 1))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    first, second = by_rank[0]
    assert second.steps == []
    assert second.progress.iteration == 6
    # Validation goes on with later samples; the test data are the same.
    assert second.evaluations[-1] == first.evaluations[-1]
    assert len(second.evaluations) == 2
    assert not (tmp_path / "other").exists()


def test_evaluating_alone_with_evaluation_off_is_refused(corpus: str) -> None:
    with pytest.raises(
        ConfigError, match="an evaluation alone was asked for, and evaluation is off"
    ):
        tiny_run(corpus, eval_only=True, eval_iters=0)
