"""Ranks that share a replica received the same batches, in a real run."""

from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from megatron.engine.base import RawBatch
from megatron.errors import DataError
from megatron.initialize import shutdown_megatron
from megatron.loop import data_feed
from megatron.mpu.context import Group
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run, train, write_tiny_corpus

LAYOUTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def runs_of_one_replica(corpus: str) -> list[str]:
    """Train on two ranks of one replica, right and with another token on rank 1."""
    receive = data_feed.broadcast_batch

    def flipped(batch: RawBatch | None, group: Group) -> RawBatch:
        received = receive(batch, group)
        if dist.get_rank() == 1:
            received["text"][0, 3] ^= 1  # type: ignore[index]
        return received

    found = []
    for layout in LAYOUTS:
        for fault in (receive, flipped):
            with patch.object(data_feed, "broadcast_batch", fault):
                try:
                    train(tiny_run(corpus, check_agreement_interval=1, **{layout: 2}))
                    found.append("")
                except DataError as error:
                    shutdown_megatron()
                    found.append(error.found)
    return found


def test_a_token_that_differs_within_a_replica_is_found(tmp_path: Path) -> None:
    problem = "samples 0 to 8 of the run: ranks 0 and 1 of replica 0 received different batches"
    for found in run_on_ranks(2, runs_of_one_replica, write_tiny_corpus(tmp_path)):
        assert found == ["", problem] * len(LAYOUTS)
