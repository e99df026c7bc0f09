"""A window is read where there is one, and absent is not null."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.mistral import MISTRAL
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from tests.unit.checkpoint.formats.huggingface.families.test_llama import SHAPE


def read(**values: Any) -> ModelConfig:
    fields = Fields(Path("config.json"), SHAPE | {"num_key_value_heads": 2} | values)
    return from_plain(ModelConfig, MISTRAL.read_config(fields))


def test_windows_of_the_releases() -> None:
    assert read(sliding_window=4096).sliding_window == 4096
    assert read(sliding_window=None).sliding_window is None
    assert read().sliding_window == 4096  # what transformers takes for an absent field


def test_the_number_of_key_value_heads_is_needed() -> None:
    with pytest.raises(CheckpointError, match="lacks a field") as caught:
        read(num_key_value_heads=None)
    assert "no 'num_key_value_heads'" in str(caught.value)
