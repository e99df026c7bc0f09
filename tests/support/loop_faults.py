"""Faults between the ranks of a run, put in from outside, which the training loop has to notice."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron.checkpoint.folder import shared_view
from megatron.data.blendable_dataset import SampleDataset
from megatron.data.loading import loaders
from megatron.engine.base import PendingReport
from megatron.engine.native import NativeEngine

FIRST_FAULTY_RANK = 1


class Steps:
    """Counts the optimizer steps of this rank's native engines."""

    def __init__(self) -> None:
        self.done = 0

    def any(self) -> bool:
        """Whether one is done."""
        return self.done > 0


@contextmanager
def counted_steps() -> Iterator[Steps]:
    """While inside, count steps."""
    steps, start_step = Steps(), NativeEngine.start_step

    def counted(self: NativeEngine, *args: Any) -> PendingReport:
        result = start_step(self, *args)
        steps.done += 1
        return result

    with patch.object(NativeEngine, "start_step", counted):
        yield steps


@contextmanager
def other_loss_scale(*, after: int) -> Iterator[None]:
    """While inside, rank 1 shows another loss scale than it uses once it has done so many steps."""
    scale = NativeEngine.loss_scale.fget  # type: ignore[attr-defined]

    with counted_steps() as steps:

        def shown(self: NativeEngine) -> float:
            value: float = scale(self)
            is_faulty = dist.get_rank() == FIRST_FAULTY_RANK and steps.done >= after
            return 2 * value if is_faulty else value

        with patch.object(NativeEngine, "loss_scale", property(shown)):
            yield


@contextmanager
def other_weights(*, after: int) -> Iterator[None]:
    """While inside, a weight of rank 1's replica changes after so many steps."""
    start_step = NativeEngine.start_step
    done = 0

    def then_changed(self: NativeEngine, *args: Any) -> PendingReport:
        nonlocal done
        result = start_step(self, *args)
        done += 1
        if done == after and dist.get_rank() == FIRST_FAULTY_RANK:
            with torch.no_grad():
                self.stage.get_parameter("final_norm.weight")[0] += 0.125
        return result

    with patch.object(NativeEngine, "start_step", then_changed):
        yield


@contextmanager
def skipped_sample(*, after: int) -> Iterator[None]:
    """While inside, rank 1's loader reads one sample further once it has read so many batches."""
    read, done = loaders.read_batch, 0

    def skipping(dataset: SampleDataset, ids: Sequence[int]) -> loaders.BatchWithIds:
        nonlocal done
        done += 1
        skips = dist.get_rank() == FIRST_FAULTY_RANK and done > after
        return read(dataset, [each + 1 for each in ids] if skips else ids)

    with patch.object(loaders, "read_batch", skipping):
        yield


@contextmanager
def own_disk(parent: Path) -> Iterator[None]:
    """While inside, this rank is a node of its own, whose relative paths are on its own disk."""
    rank, world_size, before = dist.get_rank(), dist.get_world_size(), Path.cwd()
    disk = parent / f"disk {rank}"
    disk.mkdir(parents=True, exist_ok=True)
    node = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,  # the process group is there already
    }
    with ExitStack() as faults:
        faults.enter_context(patch.dict(os.environ, {key: str(at) for key, at in node.items()}))
        patience = {"patience_s": 0.0}
        refuse = shared_view.refuse_separate_disks
        faults.enter_context(patch.object(refuse, "__kwdefaults__", patience))
        os.chdir(disk)
        try:
            yield
        finally:
            os.chdir(before)
