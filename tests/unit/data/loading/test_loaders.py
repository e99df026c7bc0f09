"""Loaders give each rank its micro-batches, and errors of workers as what they are."""

import os
import signal

import numpy as np
import pytest
import torch

from megatron.data.data_samplers import MegatronPretrainingSampler
from megatron.data.loading.loaders import build_data_loader, make_data_loader
from megatron.errors import ConfigError, DataError, MachineError


class Windows:
    """Sample i is [i, i + 1, i + 2]; sample `bad` raises the given error."""

    def __init__(self, length, bad=None, error=None):
        self.length, self.bad, self.error = length, bad, error

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.bad:
            raise self.error
        return {"text": np.arange(index, index + 3, dtype=np.int64)}

    def fingerprint(self):
        return "windows"

    def check_unchanged(self):
        pass


def load(dataset, **changes):
    options = {
        "consumed_samples": 0,
        "micro_batch_size": 2,
        "data_parallel_rank": 0,
        "data_parallel_size": 1,
        "num_workers": 0,
    }
    return build_data_loader(dataset, **(options | changes))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_gives_the_micro_batches_of_its_rank_in_order(num_workers):
    loader = load(
        Windows(12),
        consumed_samples=4,
        data_parallel_rank=1,
        data_parallel_size=2,
        num_workers=num_workers,
    )
    batches = list(loader)
    assert [batch["text"][:, 0].tolist() for batch in batches] == [[6, 7], [10, 11]]
    assert batches[0]["text"].dtype == torch.int64
    assert batches[0]["text"].shape == (2, 3)
    assert len(loader) == 2


def test_a_cyclic_loader_goes_on_into_the_next_epoch():
    loader = load(Windows(6), kind="cyclic", seed=5)
    epochs = [[i for b in loader for i in b["text"][:, 0].tolist()] for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 2
    assert epochs[0] != epochs[1]
    resumed = load(Windows(6), kind="cyclic", seed=5, consumed_samples=6)
    assert [i for b in resumed for i in b["text"][:, 0].tolist()] == epochs[1]


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="an unknown kind of data loader"):
        load(Windows(6), kind="random")


def test_a_loader_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    list(load(Windows(6)))
    list(load(Windows(6), kind="cyclic"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_error_arrives_as_itself_with_its_fix(num_workers):
    error = DataError("block 7 is damaged", found="byte 12", fix="copy it again")
    loader = load(Windows(6, bad=2, error=error), num_workers=num_workers)
    with pytest.raises(DataError, match="block 7 is damaged") as raised:
        list(loader)
    assert raised.value.fix == "copy it again"
    if num_workers:
        assert "in a data-loader worker" in raised.value.__notes__[0]
        assert "__getitem__" in raised.value.__notes__[0]


def test_another_error_of_a_worker_keeps_its_class_and_traceback():
    loader = load(Windows(6, bad=2, error=ZeroDivisionError("oops")), num_workers=1)
    with pytest.raises(ZeroDivisionError, match="oops") as raised:
        list(loader)
    assert "__getitem__" in str(raised.value)


def test_samples_of_different_lengths_are_refused():
    class Ragged(Windows):
        def __getitem__(self, index):
            return {"text": np.arange(3 + index, dtype=np.int64)}

    with pytest.raises(DataError, match="different shapes") as raised:
        list(load(Ragged(4)))
    assert "(3,)" in str(raised.value)
    assert "(4,)" in str(raised.value)


def test_a_negative_number_of_workers_is_refused():
    with pytest.raises(ConfigError, match="--num-workers -1"):
        load(Windows(4), num_workers=-1)


def test_the_loader_is_bound_to_the_length_of_its_dataset():
    loader = load(Windows(7))
    assert isinstance(loader.batch_sampler, MegatronPretrainingSampler)
    assert loader.batch_sampler.total_samples == 7
    assert len(loader.dataset) == 7
    assert loader.dataset[1]["text"].tolist() == [1, 2, 3]


def test_the_loader_has_two_names():
    assert make_data_loader is build_data_loader


class Kills(Windows):
    """Windows of which one kills the process that reads it."""

    def __getitem__(self, index):
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_is_killed_is_an_error_of_the_machine():
    loader = load(Kills(6), num_workers=1)
    with pytest.raises(MachineError, match="a process that reads data ahead has ended") as raised:
        list(loader)
    assert "DataLoader worker (pid" in str(raised.value.found)
