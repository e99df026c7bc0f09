"""Tests that a rank stuck in a collective ends soon after another rank has failed."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.errors import PeerError
from megatron.mpu.collectives import barrier, broadcast_object
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from megatron.peers.watch import PeerWatch
from tests.support.ranks import run_on_ranks

SOON_S = 10  # about three seconds by design, and room for a machine under load


def store_over_tcp() -> tuple[ParallelContext, dist.TCPStore]:
    """A store like torchrun's, hosted by rank 0."""
    ctx = ParallelContext.build(Topology.fill(dist.get_world_size(), tp=1, pp=1))
    wait = timedelta(seconds=20)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=wait) if ctx.rank == 0 else None
    port = broadcast_object(store.port if store else None, ctx.world)
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=wait)
    return ctx, store


def watch_over_tcp() -> tuple[ParallelContext, PeerWatch]:
    ctx, store = store_over_tcp()
    return ctx, PeerWatch(store, ctx.rank, ctx.world.size)


def one_fails_and_one_is_stuck(rank_that_fails: int) -> None:
    ctx, watch = watch_over_tcp()
    if ctx.rank == rank_that_fails:
        watch.announce("the disk is full")
        time.sleep(30)  # alive, so that the other's barrier does not fail by itself
    barrier(ctx.world)


def the_host_of_the_store_dies() -> None:
    ctx, store = store_over_tcp()
    watch = PeerWatch(store, ctx.rank, ctx.world.size) if ctx.rank == 1 else None
    barrier(ctx.world)
    del store  # on rank 0 this ends the server, as the end of its process would
    time.sleep(30)
    del watch


def all_end_well() -> None:
    ctx, watch = watch_over_tcp()
    if ctx.rank == 1:
        time.sleep(1.5)  # the host of the store waits for this rank
    watch.close()


def one_stalls_and_one_gives_up_on_it(output_path: str) -> None:
    ctx, watch = watch_over_tcp()
    if ctx.rank == 1:
        watch.announce("timed out while waiting for rank 0")
        time.sleep(30)
    os.dup2(os.open(output_path, os.O_WRONLY | os.O_CREAT), 2)
    read_a_file_that_hangs()


def read_a_file_that_hangs() -> None:
    time.sleep(30)


def test_a_rank_that_stalls_shows_where(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 0 of 2 died with exit code 76"):
        run_on_ranks(2, one_stalls_and_one_gives_up_on_it, str(tmp_path / "said"))
    output = (tmp_path / "said").read_text()
    assert "rank 1: timed out while waiting for rank 0" in output
    assert "this rank was here:" in output
    assert "in read_a_file_that_hangs" in output


@pytest.mark.parametrize("rank_that_fails", [0, 1])
def test_a_rank_stuck_in_a_barrier_ends_soon(rank_that_fails: int) -> None:
    stuck = 1 - rank_that_fails
    start = time.monotonic()
    with pytest.raises(AssertionError, match=f"rank {stuck} of 2 died with exit code 76"):
        run_on_ranks(2, one_fails_and_one_is_stuck, rank_that_fails)
    assert time.monotonic() - start < SOON_S


def test_a_rank_ends_when_the_host_of_the_store_has_died() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 of 2 died with exit code 76"):
        run_on_ranks(2, the_host_of_the_store_dies)
    assert time.monotonic() - start < SOON_S


def test_nobody_is_ended_when_all_end_well() -> None:
    assert run_on_ranks(2, all_end_well) == [None, None]


def one_fails_and_one_looks() -> str:
    ctx, watch = watch_over_tcp()
    watch.check()
    barrier(ctx.world)
    if ctx.rank == 1:
        watch.announce("the disk is full")
    message, told = "", list[str]()
    watch.tell(lambda error: told.append(str(error)))
    deadline = time.monotonic() + SOON_S
    while ctx.rank == 0 and not (message and told) and time.monotonic() < deadline:
        try:
            watch.check()
        except PeerError as error:
            message = str(error)
    watch.close()
    assert told == [message] * (ctx.rank == 0)
    return message


def test_whoever_looks_hears_of_a_failure_before_the_process_is_ended() -> None:
    first, _ = run_on_ranks(2, one_fails_and_one_looks)
    assert "rank 1 failed, so this rank ends too" in first
    assert "the disk is full" in first
