"""Config groups with every required field filled in, for tests that change one of them."""

from typing import Any

import pytest

from megatron.arguments import parse_args
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.config.runtime import LaunchConfig, LoggingConfig
from megatron.config.training import TrainingConfig
from megatron.errors import ConfigError, PreflightError


def a_model(**changes: Any) -> ModelConfig:
    """Two layers of width eight."""
    return ModelConfig(**{"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2} | changes)


def some_data(**changes: Any) -> DataConfig:
    """Sixteen tokens a sample from one corpus."""
    return DataConfig(**{"seq_length": 16, "data_path": ("corpus",)} | changes)


def a_tokenizer(**changes: Any) -> TokenizerConfig:
    """A tokenizer that needs no file."""
    return TokenizerConfig(**{"tokenizer_type": "NullTokenizer", "vocab_size": 100} | changes)


def some_training(**changes: Any) -> TrainingConfig:
    """Ten iterations of two samples."""
    return TrainingConfig(**{"micro_batch_size": 2, "train_iters": 10} | changes)


def a_schedule(**changes: Any) -> ScheduleConfig:
    """A learning rate that only decays."""
    return ScheduleConfig(**{"lr": 1e-3} | changes)


def a_run(**groups: Any) -> RunConfig:
    """A whole run; any group can be given."""
    return RunConfig(
        **{
            "model": a_model(),
            "data": some_data(),
            "tokenizer": a_tokenizer(),
            "training": some_training(),
            "optimizer": OptimizerConfig(),
            "schedule": a_schedule(),
            "precision": PrecisionConfig(),
            "parallel": ParallelConfig(),
            "checkpoint": CheckpointConfig(),
            "logging": LoggingConfig(),
            "launch": LaunchConfig(),
        }
        | groups
    )


_FLAGS = """
    --num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --data-path corpus
    --tokenizer-type NullTokenizer --vocab-size 100 --micro-batch-size 2 --train-iters 10
    --lr 1e-3
"""
COMMAND = _FLAGS.split()
"""The flags that give `a_run()`."""


def problems_of(*words: str, base: list[str] = COMMAND, **keywords: Any) -> list[ConfigError]:
    """What is wrong with a command line, in the order of the report."""
    with pytest.raises(PreflightError) as caught:
        parse_args([*base, *words], **keywords)
    assert all(finding.check == "command_line" for finding in caught.value.findings)
    return [finding.error for finding in caught.value.findings]
