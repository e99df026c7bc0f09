"""What a rank keeps of fully sharded parameters, and what it has beside that for a time."""

from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from megatron.config.run import RunConfig
from megatron.optimizer import sharded_flats
from megatron.optimizer.grad_buffer import Flat
from megatron.optimizer.releasable import ReleasableTensor
from tests.support.ranks import run_on_ranks
from tests.support.tiny import MODELS, tiny_run, train, write_tiny_corpus


class Memory(NamedTuple):
    """Bytes of parameters and their gradients on a rank."""

    kept: int  # shares
    largest: int  # of the buffers that come and go
    most: int  # of them that had memory at the same time
    all: int  # that they would have at the same time
    left: int  # that have memory after the run


class Counted(ReleasableTensor):
    """Buffers that count what of them has memory."""

    now = most = 0
    made: list["Counted"]  # of a process that ends with the test

    def __init__(self, elements: int, **kind: Any) -> None:
        super().__init__(elements, **kind)
        Counted.made.append(self)

    @property
    def size(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def take(self) -> None:
        if not self.is_taken:
            Counted.now += self.size
            Counted.most = max(Counted.most, Counted.now)
        super().take()

    def release(self) -> None:
        if self.is_taken and self in Counted.made:
            Counted.now -= self.size
        super().release()


def memory_of(configs: list[RunConfig]) -> list[Memory]:
    found = []
    for config in configs:
        Counted.made, Counted.now, Counted.most = [], 0, 0
        flats: list[Flat] = []

        def laid_out(
            *args: Any, flats: list[Flat] = flats, real: Any = sharded_flats._flat
        ) -> Flat:
            flats.append(real(*args))
            return flats[-1]

        with (
            patch.object(sharded_flats, "ReleasableTensor", Counted),
            patch.object(sharded_flats, "_flat", laid_out),
        ):
            train(config)
        sizes = [room.size for room in Counted.made]
        kept = sum(flat.data.numel() * flat.data.element_size() for flat in flats)
        left = sum(room.size for room in Counted.made if room.is_taken)
        found.append(Memory(kept, max(sizes), Counted.most, sum(sizes), left))
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def test_a_rank_keeps_its_share_and_has_a_few_layers_at_a_time(corpus: str) -> None:
    full = {
        **MODELS["llama"],
        "num_layers": 8,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "train_iters": 1,
    }
    ways: list[dict[str, Any]] = [
        {},
        {"overlap_param_gather": True, "overlap_grad_reduce": True},
        {"reshard_after_forward": False},
    ]
    for by_way in run_on_ranks(2, memory_of, [tiny_run(corpus, **full, **way) for way in ways]):
        plain, overlapped, kept = by_way
        for memory in by_way:
            assert memory.kept * 2 == memory.all
            assert not memory.left, "nothing of the last step is needed"
        # A layer's parameters and gradients, and the last layer's, which a loss reads.
        assert plain.most <= 3 * plain.largest
        # Those of a layer more of each.
        assert overlapped.most <= 5 * overlapped.largest
        # All parameters at once, and the gradients of a layer.
        assert kept.all / 2 <= kept.most <= kept.all / 2 + kept.largest
