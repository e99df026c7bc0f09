"""Ranks share one build, on one node or several; the error of a rank's timeout names the index."""

import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from megatron.data.orders import lease
from megatron.data.orders.index_cache import IndexCache
from megatron.data.orders.lease import LeaseTiming
from megatron.errors import MachineError
from megatron.mpu import progress_barrier
from megatron.mpu.collectives import all_gather_object, barrier
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.ranks import run_on_ranks

DESCRIPTION = {"corpus": "abc", "seed": 1}


def context_of(ranks: int, timeout_s: float) -> ParallelContext:
    return ParallelContext.build(Topology(1, 1, ranks), timeout=timedelta(seconds=timeout_s))


def build_together(folders: list[Path], builders: list[int]) -> None:
    context = context_of(len(folders), 60)
    built = []

    def build() -> dict[str, np.ndarray]:
        built.append(1)
        time.sleep(0.5)
        return {"doc_idx": np.arange(3)}

    rank = context.dp.rank
    cache = IndexCache(
        folders=(folders[rank],),
        is_builder=rank in builders,
        wait=lambda: barrier(context.dp),
    )
    index = cache.load_or_build("train", DESCRIPTION, build=build)
    assert index["doc_idx"].tolist() == [0, 1, 2]
    counts = all_gather_object(len(built), context.dp)
    # Of ranks that see one folder, one builds.
    for folder in set(folders):
        assert sum(count for count, seen in zip(counts, folders) if seen == folder) == 1


@pytest.mark.parametrize("nodes", [1, 2])
def test_all_that_see_one_folder_build_once(tmp_path: Path, nodes: int) -> None:
    """Also the builders of two nodes, whose file system is shared."""
    builders = [0] if nodes == 1 else [0, 2]
    run_on_ranks(4, build_together, [tmp_path / "shared"] * 4, builders)


def test_nodes_need_no_common_folder(tmp_path: Path) -> None:
    folders = [tmp_path / "one"] * 2 + [tmp_path / "two"] * 2
    run_on_ranks(4, build_together, folders, [0, 2])


def test_ranks_that_do_not_see_the_builders_folder_build_once_for_themselves(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / "one", *[tmp_path / "two"] * 3]
    run_on_ranks(4, build_together, folders, [0])


def build_for_longer_than_a_barrier_may_take(folder: Path) -> None:
    context = context_of(2, 2)

    def build_slowly() -> dict[str, np.ndarray]:
        time.sleep(3)
        return {"doc_idx": np.arange(3)}

    cache = IndexCache(
        folders=(folder,), is_builder=context.dp.is_first, wait=lambda: barrier(context.dp)
    )
    assert len(cache.load_or_build("train", DESCRIPTION, build=build_slowly)["doc_idx"]) == 3


def test_a_build_may_take_longer_than_a_barrier(tmp_path: Path) -> None:
    run_on_ranks(2, build_for_longer_than_a_barrier_may_take, tmp_path)


def build_on_another_node_and_say_so(folders: list[Path]) -> None:
    """The lock is not seen, and a word of the builder's thread is."""
    lease._BEAT_S = progress_barrier._BEAT_S = 0.2
    context = context_of(2, 60)
    place = progress_barrier.ProgressBarrier(context.world, patience_s=1.5)

    def build_slowly() -> dict[str, np.ndarray]:
        time.sleep(4)
        return {"doc_idx": np.arange(3)}

    def build_soon() -> dict[str, np.ndarray]:
        return {"doc_idx": np.arange(3)}

    cache = IndexCache(
        folders=(folders[context.dp.rank],), wait=place.wait, report_progress=place.report_progress
    )
    build = build_slowly if context.dp.is_first else build_soon
    assert len(cache.load_or_build("train", DESCRIPTION, build=build)["doc_idx"]) == 3


def test_a_node_waits_for_the_builder_of_another_while_that_works(tmp_path: Path) -> None:
    run_on_ranks(2, build_on_another_node_and_say_so, [tmp_path / "one", tmp_path / "two"])


def wait_in_vain(folders: list[Path]) -> str:
    """The builder is on another node, so that only the barrier detects its end."""
    context = context_of(2, 2)

    def build_slowly() -> dict[str, np.ndarray]:
        time.sleep(4)
        return {"doc_idx": np.arange(3)}

    cache = IndexCache(
        folders=(folders[context.dp.rank],),
        is_builder=context.dp.is_first,
        wait=lambda: barrier(context.dp),
        timing=LeaseTiming(settle_s=0.5),
    )
    with pytest.raises(MachineError) as raised:
        cache.load_or_build("train", DESCRIPTION, build=build_slowly)
    return str(raised.value)


def test_a_rank_that_waits_for_too_long_names_the_index(tmp_path: Path) -> None:
    _, waited = run_on_ranks(2, wait_in_vain, [tmp_path / "one", tmp_path / "two"])
    assert "the ranks did not meet after the index train-" in waited
    assert "--distributed-timeout-minutes" in waited
