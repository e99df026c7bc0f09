"""A rank whose device or network is wrong is named on every rank, before it trains."""

import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron.errors import MachineError
from megatron.initialize import initialize_megatron, shutdown_megatron
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from megatron.preflight import probe
from megatron.preflight.probe import probe_machine
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run, write_tiny_corpus

RANKS = 2
MOST_S = 0.05  # what the probe may cost a rank


def start(corpus: str) -> str:
    """Initialise; return what was wrong."""
    try:
        initialize_megatron(tiny_run(corpus))
    except MachineError as error:
        return error.found
    shutdown_megatron()
    return ""


def starts_with_faults(corpus: str) -> list[str]:
    is_faulty, all_reduce = dist.get_rank() == 1, probe.all_reduce

    def wrong_product(dtype: torch.dtype) -> str | None:
        is_wrong = is_faulty and dtype is torch.float64
        return "matmul in float64 has 2 of 256 wrong elements" if is_wrong else None

    def lossy(tensor: torch.Tensor, group: object) -> torch.Tensor:
        return all_reduce(torch.zeros_like(tensor) if is_faulty else tensor, group)  # type: ignore[arg-type]

    found = [start(corpus)]
    for name, fault in (("operation_problem", wrong_product), ("all_reduce", lossy)):
        with patch.object(probe, name, fault):
            found.append(start(corpus))
    return found


def test_a_rank_that_computes_or_communicates_wrongly_is_named_by_all(tmp_path: Path) -> None:
    missing = ", ".join(
        f"all_reduce in {dtype} has wrong parts of ranks 1"
        for dtype in ("float64", "float32", "int64")
    )
    for right, product, collective in run_on_ranks(
        RANKS, starts_with_faults, write_tiny_corpus(tmp_path)
    ):
        assert right == ""
        assert product == "rank 1: matmul in float64 has 2 of 256 wrong elements"
        assert collective == "; ".join(f"rank {rank}: {missing}" for rank in range(RANKS))


def seconds_of_a_probe() -> float:
    """Return the CPU time of a rank for the second probe: the first one loads libraries."""
    world = ParallelContext.build(Topology.fill(dist.get_world_size(), tp=1, pp=1)).world
    dtypes = (torch.bfloat16, torch.float32, torch.int64)
    probe_machine(dtypes, world)
    began = time.process_time()
    probe_machine(dtypes, world)
    return time.process_time() - began


def test_a_probe_is_cheap() -> None:
    assert max(run_on_ranks(RANKS, seconds_of_a_probe)) < MOST_S
