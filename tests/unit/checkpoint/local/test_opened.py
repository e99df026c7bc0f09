"""A local checkpoint as a run reads it: its own parts, and nothing but those."""

from pathlib import Path

import pytest

from megatron.checkpoint.folder.manifest import GridLayout
from megatron.checkpoint.formats.native import sharded
from megatron.checkpoint.local.folder import Facts, LocalFolder, stored_state
from megatron.checkpoint.local.opened import OpenedLocal
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
from tests.unit.checkpoint.toy import differences, rank_at, snapshot_at

RANK = 2  # of a grid of 2 x 2: it holds parts alone


@pytest.fixture
def opened(tmp_path: Path) -> OpenedLocal:
    folder = LocalFolder(tmp_path, "0123456789abcdef", 4)
    folder.make()
    layout = GridLayout(tp=2, pp=1, dp=2)
    folder.write(snapshot_at(2, 2, RANK), 7, layout=layout, facts=Facts(RANK, "word", 0))
    state = stored_state(RANK, folder.directory(RANK, 7))
    return OpenedLocal(state.directory, state.manifest, ParallelContext.single(), threads=2)


def test_a_rank_gets_every_bit_of_its_parts_back(opened: OpenedLocal) -> None:
    found = rank_at(2, 2, RANK, seed=None)
    opened.read_into(found.tensors)
    assert differences(found, rank_at(2, 2, RANK)) == []
    assert opened.read_generators().values == {"rank": RANK}


def test_it_is_a_checkpoint_of_our_format_that_can_be_gone_on_from(opened: OpenedLocal) -> None:
    opened.check_resumable()
    opened.verify_all()
    opened.close()
    assert opened.is_native
    assert opened.format_name == sharded.NAME
    assert opened.ctx.world.size == 1
    assert opened.manifest.config["model"] == {"hidden_size": 6}


def test_tensors_that_the_run_has_not_and_those_that_are_not_there_are_named(
    opened: OpenedLocal,
) -> None:
    tensors = rank_at(2, 2, RANK, seed=None).tensors
    with pytest.raises(CheckpointError, match="unexpected: model/embedding"):
        opened.read_into(tensors[1:])
    opened.read_into([t for t in tensors if t.name.startswith("model/")], prefixes=("model/",))
    with pytest.raises(CheckpointError, match="do not make up what this rank needs"):
        opened.read_into(rank_at(2, 2, 1, seed=None).tensors)
