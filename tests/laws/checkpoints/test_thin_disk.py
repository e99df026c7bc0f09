"""A disk that accepts every write and stores nothing: only fsync fails, and every save reports it.

A real one (ext4 in a sparse image on a pool without room) where this process may mount it, which
takes root and a loop device. Elsewhere fsync itself says what that disk would, and each test warns
of that, so that the end of a test run counts them.
"""

import errno
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import megatron.training
from megatron.checkpoint.folder.run_folder import TRACKER
from megatron.config.run import RunConfig
from megatron.errors import CheckpointError
from tests.support.checkpoints.small_disk import ThinDisk, thin_disk
from tests.support.ranks import run_on_ranks
from tests.support.tiny import assert_went_on, tiny_run, train, train_all, write_tiny_corpus

RANKS, STEPS = 2, 4
SAVED, FAILING = 1, 2
DEADLINE_S = 120.0

_TP = {"tensor_model_parallel_size": 2, "hidden_dropout": 0.1}
# Flags of the run, and how it saves.
FORMATS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "waits": (_TP, {}),
    "beside": (_TP, {"async_save": True}),
    "megatron": (_TP, {"checkpoint_format": "megatron"}),
    "deepspeed": (
        {"deepspeed": True, "zero_stage": "1", "fp64": False, "hidden_dropout": 0.1},
        {"checkpoint_format": "deepspeed"},
    ),
}


def train_until_the_pool_is_empty(config: RunConfig, disk: ThinDisk | None) -> str:
    """What ends a run when its second save begins and there is nothing behind the disk any more."""
    real, saves = megatron.training.save_checkpoint, 0
    with ExitStack() as faults:

        def save(*args: Any, **kwargs: Any) -> None:
            nonlocal saves
            saves += 1
            if saves == FAILING:
                kwargs["saves"].wait()  # for the first, if it is being written beside the training
            if saves == FAILING and disk is None:
                full = OSError(errno.ENOSPC, "No space left on device")
                faults.enter_context(patch.object(os, "fsync", side_effect=full))
            elif saves == FAILING:
                if not dist.get_rank():
                    disk.use_up()
                dist.barrier()
            real(*args, **kwargs)

        with patch.object(megatron.training, "save_checkpoint", save):
            try:
                train(config)
            except CheckpointError as error:
                return str(error)
    return "nothing was said"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("name", FORMATS)
def test_a_save_that_only_fsync_refuses_fails_on_all_ranks_and_the_former_is_stored(
    corpus: str, tmp_path: Path, name: str
) -> None:
    model, how = FORMATS[name]
    flags = {"train_iters": STEPS, "micro_batch_size": 4, **model}
    start = {"timeout_s": DEADLINE_S, "deepspeed": "deepspeed" in model}
    with thin_disk(tmp_path / "disk", tmp_path / "pool") as disk:
        if disk is None:
            warnings.warn("no loop device may be mounted here: fsync stands in", stacklevel=1)
        folder = tmp_path / "disk" / "run"
        saving = tiny_run(corpus, **flags, **how, save=str(folder), save_interval=1)
        first, second = run_on_ranks(RANKS, train_until_the_pool_is_empty, saving, disk, **start)
        assert first == second
        assert f"failed while writing the checkpoint of iteration {FAILING}" in first
        # If the kernel has tried to store a file by itself, the second of two errors is reported.
        assert re.search(rf"(ENOSPC|EIO) at {folder}/\.[a-z_]+0*{FAILING}\.partial-\w+/\S+", first)
        if disk is not None:
            disk.remount()
        left = {path.name for path in folder.iterdir()}
        assert TRACKER in left
        assert [name for name in left if name.startswith(".") or name.endswith(str(FAILING))] == []
        assert (folder / TRACKER).read_text() == f"{SAVED}\n"
        runs = [tiny_run(corpus, **flags), tiny_run(corpus, **flags, load=str(folder))]
        ranks = run_on_ranks(RANKS, train_all, runs, **start)
    straight, resumed = ([of_rank[which] for of_rank in ranks] for which in range(2))
    assert_went_on(resumed, straight, last=STEPS - SAVED)
