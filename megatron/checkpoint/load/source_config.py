"""Completes the config of a checkpoint of another tool to that of a run of ours.

A format records the shape of its model, and few flags of the training. Missing fields take our
defaults here, so that programs can build a model from a checkpoint's own config.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.source import CheckpointSource
from megatron.config.run import GROUPS, RunConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.progress import Progress

# Required fields that a checkpoint of weights does not have; training takes them from flags.
_STAND_INS: Mapping[str, Mapping[str, Any]] = {
    "data": {"data_path": ["unknown"]},
    "training": {"micro_batch_size": 1},
    "schedule": {"lr": 1e-4},
}
_WORD_TABLE = "model/embedding.word.weight"
NOTHING: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


def completed_config(
    source: CheckpointSource, fallback: Mapping[str, Mapping[str, Any]] = NOTHING
) -> dict[str, dict[str, Any]]:
    """Return the config of `source` with every group and field, as `RunConfig.to_plain` gives it.

    Args:
        fallback: groups for fields that `source` does not record; recorded ones take precedence.

    Raises:
        CheckpointError: it does not record the shape of its model, or contradicts itself.
    """
    groups: dict[str, dict[str, Any]] = {
        name: {**fallback.get(name, {}), **source.config.get(name, {})} for name in GROUPS
    }
    for name, values in _STAND_INS.items():
        for field, value in values.items():
            groups[name].setdefault(field, value)
    if groups["training"].get("train_samples") is None:
        groups["training"].setdefault("train_iters", 1)
    if groups["tokenizer"].get("tokenizer_type") is None and _WORD_TABLE in source.tensors:
        # Only the number of tokens is known; one of them ends documents.
        rows = source.tensors[_WORD_TABLE].global_shape[0]
        groups["tokenizer"] |= {"tokenizer_type": "NullTokenizer", "vocab_size": rows - 1}
    extra = dict(source.config.get("extra", {}))
    try:
        complete = RunConfig.from_plain({**groups, "extra": extra})
    except ConfigError as error:
        raise CheckpointError(
            "the checkpoint does not record enough about its model to be used without flags",
            found=f"{source.directory} ({source.format_name}): {error.problem}; {error.found}",
            fix="load it with the flags of its model beside it (--num-layers ..), in training with "
            "--load FOLDER --finetune",
        ) from error
    beside = {name: dict(values) for name, values in source.config.items() if name not in GROUPS}
    return beside | complete.to_plain()


def completed_progress(source: CheckpointSource, iteration: int) -> dict[str, int]:
    """Return the progress of `source` at `iteration`, with zeros for missing counters."""
    known = {name: int(value) for name, value in source.progress.items()}
    return {**Progress().to_plain(), **known, "iteration": iteration}
