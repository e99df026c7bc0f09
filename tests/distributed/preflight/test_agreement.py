"""Ranks that differ are named, with what they hold, on every rank."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron.config.data import DataConfig
from megatron.data.corpus.sources import data_sources
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder
from megatron.errors import ConfigError, DataError, MegatronError, NumericsError
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.topology import Topology
from megatron.preflight.agreement import agree_on_data, agree_on_launch, agree_on_state
from tests.support.ranks import run_on_ranks


def what_each_rank_is_told() -> list[str]:
    ctx = ParallelContext.build(Topology.fill(dist.get_world_size(), tp=1, pp=1))
    agree_on_launch({"torch": "2.13", "flags": "ab"}, ctx.world)
    agree_on_state({"iteration": 3, "loss scale": 1.0}, ctx.world)
    messages = []
    odd = ctx.rank == 2
    for kind, call in (
        (ConfigError, lambda: agree_on_launch({"torch": "2.1" if odd else "2.13"}, ctx.world)),
        (ConfigError, lambda: agree_on_launch({"a": "1"} if odd else {}, ctx.world)),
        (NumericsError, lambda: agree_on_state({"iteration": 3 + ctx.rank}, ctx.world)),
    ):
        try:
            call()
        except MegatronError as error:
            messages.append(
                f"{error.problem}: {error.found}" if type(error) is kind else repr(error)
            )
    return messages


def test_every_rank_is_told_who_differs() -> None:
    expected = [
        "the ranks do not run the same thing: torch: 2.13 on rank 0, 1, 2.1 on rank 2",
        "the ranks do not run the same thing: a: (nothing) on rank 0, 1, 1 on rank 2",
        "the ranks are no longer in lockstep: iteration: 3 on rank 0, 4 on rank 1, 5 on rank 2",
    ]
    assert run_on_ranks(3, what_each_rank_is_told) == [expected] * 3


def see_data(nodes: list[Path], flags: dict[str, Any]) -> str:
    ctx = ParallelContext.build(Topology.fill(dist.get_world_size(), tp=1, pp=1))
    os.chdir(nodes[ctx.rank].parent)
    try:
        agree_on_data(data_sources(DataConfig(seq_length=8, **flags)), ctx.world)
    except DataError as error:
        return f"{error.problem}: {error.found}"
    return "agreed"


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """A folder for each of two nodes, with the same corpus `c` and the same file `paths`."""
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made.append(tmp_path / name / "c")
        with MMapIndexedDatasetBuilder(made[-1], np.uint16) as builder:
            builder.add_document([1, 2, 3])
        (tmp_path / name / "paths").write_text('"T: 1 0:1 c"\n')
    return made


def outcomes_on(nodes: list[Path], *, by_file: bool = False) -> list[str]:
    flags = {"train_weighted_split_paths_path": "paths"} if by_file else {"data_path": ("c",)}
    return run_on_ranks(2, see_data, nodes, flags)


def test_ranks_that_see_copies_of_one_corpus_agree(nodes: list[Path]) -> None:
    assert outcomes_on(nodes) == ["agreed"] * 2
    Path(f"{nodes[1]}.sums").unlink()
    assert outcomes_on(nodes) == ["agreed"] * 2, "checksums that one node lacks"


def test_ranks_that_see_other_tokens_under_one_name_are_named(nodes: list[Path]) -> None:
    with MMapIndexedDatasetBuilder(nodes[1], np.uint16) as builder:
        builder.add_document([1, 2, 4])
    for text in outcomes_on(nodes):
        assert text.startswith("the ranks do not see the same data: pair id of c: ")
        assert " on rank 0, " in text
        assert text.endswith(" on rank 1")
        assert "index" not in text, "all sizes are the same"


def test_ranks_that_see_another_file_of_weighted_paths_are_named(nodes: list[Path]) -> None:
    assert outcomes_on(nodes, by_file=True) == ["agreed"] * 2
    nodes[1].with_name("paths").write_text('"T: 1 0:0.5 c"\n')
    for text in outcomes_on(nodes, by_file=True):
        assert text == (
            "the ranks do not see the same data: --train-weighted-split-paths-path paths: "
            '"T: 1 0:1 c" on rank 0, "T: 1 0:0.5 c" on rank 1'
        )


def test_one_rank_agrees_with_itself() -> None:
    alone = Group(ranks=(0,), rank=0)
    agree_on_launch({"torch": "2.13"}, alone)
    agree_on_state({"iteration": 1}, alone)


def test_many_ranks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = [{"x": "a"}] * 6 + [{"x": "b"}]
    monkeypatch.setattr(
        "megatron.preflight.agreement.all_gather_object", lambda facts, world: gathered
    )
    with pytest.raises(ConfigError) as caught:
        agree_on_launch({"x": "a"}, Group(ranks=(0,), rank=0))
    assert caught.value.found == "x: a on 6 ranks (0, 1, ... 5), b on rank 6"
