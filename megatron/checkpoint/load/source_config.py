"""From what a foreign checkpoint knows about its run to the whole config that ours store.

A format knows the shape of its model, and hardly a flag of the training. What it does not know
takes our defaults here, so that programs which build a model from a checkpoint's own config can.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.source import CheckpointSource
from megatron.config.run import GROUPS, RunConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.progress import Progress

# What a config needs and a checkpoint of weights cannot know; whoever trains gives flags anyway.
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
        fallback: groups of what it may not say about itself; where it does, it is right.

    Raises:
        CheckpointError: it does not know the shape of its model, or contradicts itself.
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
        # All that is known of the tokens is how many there are, one of which ends documents.
        rows = source.tensors[_WORD_TABLE].global_shape[0]
        groups["tokenizer"] |= {"tokenizer_type": "NullTokenizer", "vocab_size": rows - 1}
    extra = dict(source.config.get("extra", {}))
    try:
        complete = RunConfig.from_plain({**groups, "extra": extra})
    except ConfigError as error:
        raise CheckpointError(
            "the checkpoint does not say enough about its model to stand on its own",
            found=f"{source.directory} ({source.format_name}): {error.problem}; {error.found}",
            fix="load it with the flags of its model beside it (--num-layers ..), in training with "
            "--load FOLDER --finetune",
        ) from error
    beside = {name: dict(values) for name, values in source.config.items() if name not in GROUPS}
    return beside | complete.to_plain()


def completed_progress(source: CheckpointSource, iteration: int) -> dict[str, int]:
    """Return the progress of `source` at `iteration`, with zeros for what it does not know."""
    known = {name: int(value) for name, value in source.progress.items()}
    return {**Progress().to_plain(), **known, "iteration": iteration}
