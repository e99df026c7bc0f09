"""Ranks that see different signals and files end together, for one reason."""

import os
import signal
from pathlib import Path

import torch.distributed as dist

from megatron.config.training import TrainingConfig
from megatron.loop.stop import StopConditions
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from megatron.progress import BatchSchedule, Duration, Progress
from tests.support.ranks import run_on_ranks


def what_each_rank_hears(folder: str) -> list[str | None]:
    ctx = ParallelContext.build(Topology.fill(dist.get_world_size(), tp=1, pp=1))
    duration = Duration(BatchSchedule(1, 2, 2), train_iters=10)
    own = str(Path(folder) / "stop")
    config = TrainingConfig(micro_batch_size=1, train_iters=10, kill_switch_path=own)
    stop = StopConditions(config, duration, ctx.world)
    reasons = []
    with stop.listening():
        reasons.append(stop.reason(Progress(), steps_done=1))
        if ctx.rank == 0:  # seen by one rank or by both, depending on the moment
            Path(own).touch()
        reasons.append(stop.reason(Progress(), steps_done=1))
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        reasons.append(stop.reason(Progress(), steps_done=1))
    return reasons


def test_one_rank_that_saw_something_stops_all(tmp_path: Path) -> None:
    expected = [
        None,
        f"Detected kill switch at {tmp_path / 'stop'}. Exiting",
        "SIGTERM was received; exiting program",
    ]
    assert run_on_ranks(2, what_each_rank_hears, str(tmp_path)) == [expected, expected]
