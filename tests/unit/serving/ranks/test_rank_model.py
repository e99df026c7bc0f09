"""Weights and cache of a rank change in the second phase of a transition, and in no other."""

import pytest
import torch
from torch import nn

from megatron.errors import CheckpointError, ConfigError
from megatron.inference.paged_cache import PagedCache
from megatron.scheduling.control.member import TaskKind
from megatron.scheduling.control.messages import Prepare
from megatron.scheduling.control.states import Mode, ServingState, TransitionKind
from megatron.serving.ranks.rank_model import LoadWeights, RankModel

BLOCKS = (0, 2)


def transition(
    kind: TransitionKind, mode: Mode = Mode.DEFAULT, target: ServingState = ServingState.PAUSED
) -> Prepare:
    return Prepare(1, 0, 1, 5, kind, target, mode, 7, 0, source="folder")


NEW_WEIGHTS = transition(TransitionKind.NEW_WEIGHTS)
RESUME = transition(TransitionKind.RESUME, target=ServingState.RUNNING)


class Rank:
    """A model of one matrix, and a cache whose blocks hold their numbers."""

    def __init__(self, load: LoadWeights | None = None) -> None:
        self.model, self.noted = nn.Linear(2, 2), 0
        self.cache = PagedCache(
            layers=1,
            blocks=3,
            groups=1,
            head_width=2,
            dtype=torch.float32,
            device=torch.device("cpu"),
            block_size=2,
        )
        self.cache.pool[:, :, :3] = torch.arange(3.0).view(1, 1, 3, 1, 1, 1)
        self.rank = RankModel(self.model, self.cache, load=load, on_new_weights=self.note)

    def note(self) -> None:
        self.noted += 1

    def make(self, prepare: Prepare) -> None:
        for part in (TaskKind.PREPARE, TaskKind.APPLY):
            self.rank.do(part, prepare, BLOCKS)

    @property
    def blocks(self) -> list[float]:
        """The number in each block, that of zeros among them."""
        return self.cache.pool[0, 0, :, 0, 0, 0].tolist()


def test_new_weights_take_their_place_when_all_have_them() -> None:
    other = nn.Linear(2, 2)
    one = Rank(lambda folder: other)
    before = one.model.weight.detach().clone()
    one.rank.do(TaskKind.PREPARE, NEW_WEIGHTS, BLOCKS)
    assert torch.equal(one.model.weight, before)
    one.rank.do(TaskKind.APPLY, NEW_WEIGHTS, BLOCKS)
    assert torch.equal(one.model.weight, other.weight)
    assert torch.equal(one.model.bias, other.bias)
    assert one.noted == 1


def test_weights_that_were_not_agreed_on_are_forgotten() -> None:
    one = Rank(lambda folder: nn.Linear(2, 2))
    before = one.model.weight.detach().clone()
    one.rank.do(TaskKind.PREPARE, NEW_WEIGHTS, BLOCKS)
    one.rank.do(TaskKind.UNDO, NEW_WEIGHTS, BLOCKS)
    one.rank.do(TaskKind.APPLY, NEW_WEIGHTS, BLOCKS)
    assert torch.equal(one.model.weight, before)
    assert one.noted == 0


def test_weights_that_cannot_be_read_are_refused_and_nothing_changes() -> None:
    def fail(folder: str) -> nn.Module:
        raise CheckpointError("it is missing", found=folder, fix="give another")

    one = Rank(fail)
    before = one.model.weight.detach().clone()
    with pytest.raises(CheckpointError, match="it is missing"):
        one.rank.do(TaskKind.PREPARE, NEW_WEIGHTS, BLOCKS)
    assert torch.equal(one.model.weight, before)
    with pytest.raises(ConfigError, match="this engine cannot load other weights"):
        Rank().rank.do(TaskKind.PREPARE, NEW_WEIGHTS, BLOCKS)


def test_an_offloaded_cache_comes_back_and_gives_its_memory_meanwhile() -> None:
    one = Rank()
    one.make(transition(TransitionKind.SUSPEND, Mode.OFFLOAD))
    assert one.cache.pool.untyped_storage().size() == 0
    one.make(RESUME)
    assert [one.blocks[at] for at in (*BLOCKS, 3)] == [0.0, 2.0, 0.0]


def test_a_resumption_that_is_undone_can_be_made_again() -> None:
    one = Rank()
    one.make(transition(TransitionKind.SUSPEND, Mode.OFFLOAD))
    one.rank.do(TaskKind.PREPARE, RESUME, BLOCKS)
    one.rank.do(TaskKind.UNDO, RESUME, BLOCKS)
    assert one.cache.pool.untyped_storage().size() == 0
    one.make(RESUME)
    assert one.blocks[2] == 2.0


def test_a_dropped_cache_gives_its_memory_and_one_that_is_kept_does_not() -> None:
    one = Rank()
    one.make(transition(TransitionKind.SUSPEND, Mode.KEEP))
    one.make(RESUME)
    assert one.blocks == [0.0, 1.0, 2.0, 0.0]
    one.make(transition(TransitionKind.SUSPEND, Mode.DROP))
    assert one.cache.pool.untyped_storage().size() == 0
    one.make(RESUME)
    assert one.blocks[3] == 0.0


def test_a_suspension_that_is_undone_leaves_the_cache() -> None:
    one, suspend = Rank(), transition(TransitionKind.SUSPEND, Mode.OFFLOAD)
    one.rank.do(TaskKind.PREPARE, suspend, BLOCKS)
    one.rank.do(TaskKind.UNDO, suspend, BLOCKS)
    assert one.blocks == [0.0, 1.0, 2.0, 0.0]
    one.make(RESUME)
    assert one.blocks == [0.0, 1.0, 2.0, 0.0]
