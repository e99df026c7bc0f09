"""The resume law for local checkpoints: a run that was killed goes on from one with every bit.

The processes of the first part end by an error in the middle of a step, or of their last save, as
far from an orderly end as a process can be in which a test still runs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import megatron.loop.training_loop
import megatron.training
from megatron.checkpoint.folder.run_folder import iterations
from megatron.checkpoint.folder.skips import record_skip
from megatron.config.run import RunConfig
from megatron.loop.step_plan import plan_step
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    Record,
    assert_went_on,
    tiny_run,
    train,
    train_all,
    write_tiny_corpus,
)

LOCAL, KILLED, FULL = 2, 5, 7  # iterations: of each local checkpoint, of the kill, of the end
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas that share out the optimizer's state": {"use_distributed_optimizer": True},
    "stages": {"pipeline_model_parallel_size": 2},
}


class KilledError(Exception):
    """Stands for a kill."""


def train_until_killed(config: RunConfig, kill_at: int) -> list[int]:
    """Train until the step `kill_at`, or its save where it is the last; return what is saved."""

    def plan(config: RunConfig, duration: Any, progress: Any, curriculum: Any) -> Any:
        if progress.iteration + 1 == kill_at and kill_at < FULL:
            raise KilledError
        return plan_step(config, duration, progress, curriculum)

    def save(*args: Any, **flags: Any) -> None:
        raise KilledError

    with (
        patch.object(megatron.loop.training_loop, "plan_step", plan),
        patch.object(megatron.training, "save_checkpoint", save),
        pytest.raises(KilledError),
    ):
        train(config)
    return iterations(Path(config.checkpoint.save or ""))


def run_of(tmp_path: Path, *, interval: int = LOCAL, **flags: Any) -> RunConfig:
    save = str(tmp_path / "save")
    return tiny_run(
        write_tiny_corpus(tmp_path),
        **{"hidden_dropout": 0.1, "train_iters": FULL, "micro_batch_size": 2} | flags,
        save=save,
        load=save,
        non_persistent_save_interval=interval,
        non_persistent_local_ckpt_dir=str(tmp_path / "memory"),
    )


def straight_run(tmp_path: Path, ranks: int, **flags: Any) -> Sequence[Record]:
    return [each[0] for each in run_on_ranks(ranks, train_all, [run_of(tmp_path, **flags)])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_was_killed_goes_on_with_every_bit(tmp_path: Path, layout: str) -> None:
    straight = straight_run(tmp_path / "straight", 2, **LAYOUTS[layout])
    config = run_of(tmp_path / "killed", **LAYOUTS[layout])
    assert run_on_ranks(2, train_until_killed, config, KILLED) == [[], []], "a checkpoint is there"
    resumed = [each[0] for each in run_on_ranks(2, train_all, [config])]
    assert_went_on(resumed, straight, last=FULL - KILLED // LOCAL * LOCAL)
    assert iterations(tmp_path / "killed" / "save") == [FULL]
    assert not (tmp_path / "killed" / "memory").exists(), "memory stays in use after the run"


def test_a_run_that_ends_where_it_went_on_saves_its_state(tmp_path: Path) -> None:
    straight = straight_run(tmp_path / "straight", 1)
    config = run_of(tmp_path / "killed", interval=FULL)
    assert run_on_ranks(1, train_until_killed, config, FULL) == [[]], "a checkpoint is there"
    resumed = [each[0] for each in run_on_ranks(1, train_all, [config])]
    assert_went_on(resumed, straight, last=0)
    assert iterations(tmp_path / "killed" / "save") == [FULL]


def test_a_run_may_end_before_its_first_local_checkpoint(tmp_path: Path) -> None:
    run_on_ranks(1, train_all, [run_of(tmp_path, interval=FULL + 1)])
    assert iterations(tmp_path / "save") == [FULL]
    assert not (tmp_path / "memory").exists()


def test_a_run_that_goes_back_from_a_spike_passes_over_what_follows_its_last_checkpoint(
    tmp_path: Path,
) -> None:
    config = run_of(tmp_path)
    assert run_on_ranks(1, train_until_killed, config, KILLED) == [[]], "a checkpoint is there"
    record_skip(tmp_path / "save", LOCAL, KILLED)
    ((resumed,),) = run_on_ranks(1, train_all, [config])
    trained = FULL - (KILLED - LOCAL + 1)
    assert len(resumed.steps) == trained, "it went on from after the spike"
