"""The tensors of a micro-batch of the inverse cloze task, by name."""

import pytest
import torch

from megatron.data.loading.ict_batch import ict_batch
from megatron.errors import DataError

NAMES = ("query_tokens", "query_pad_mask", "context_tokens", "context_pad_mask", "block_data")


def test_each_tensor_is_found_by_its_name() -> None:
    raw = {name: torch.full((2, 4), at) for at, name in enumerate(NAMES)}
    assert [int(tensor[0, 0]) for tensor in ict_batch(raw)] == [0, 1, 2, 3, 4]


def test_a_batch_of_other_data_is_refused() -> None:
    with pytest.raises(DataError, match="lacks tensors that the model takes"):
        ict_batch({"text": torch.zeros(1, 4)})
