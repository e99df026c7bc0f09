"""The mean of the weights of several checkpoints of one model, as a source that any format writes.

Averaged weights often do better than the last ones (Izmailov et al. 2018, arXiv 1803.05407). Sums
are made in fp32 (fp64 of fp64) and rounded once. There is no optimizer state to go with them, so a
run can only begin from them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint import model_kind, reshard
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.source import CheckpointSource, SourceBase, TensorDescription
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.json_values import JsonObject


class AveragedSource(SourceBase):
    """The arithmetic mean of `sources`, tensor by tensor; their config and progress: the last's.

    Raises:
        CheckpointError: they are not of one model, or fewer than two.
    """

    format_name = "average"

    def __init__(self, sources: Sequence[CheckpointSource]) -> None:
        if len(sources) < 2:
            raise CheckpointError(
                "there is nothing to average",
                found=f"{len(sources)} checkpoint",
                fix="give two or more",
            )
        self._sources = tuple(sources)
        self._last = max(sources, key=lambda source: int(source.progress.get("iteration", 0)))
        for source in sources:
            _check_same_model(self._last, source)
        self.directory: Path = self._last.directory

    @property
    def tensors(self) -> Mapping[str, TensorDescription]:
        """The parameters; the optimizer's state is left behind."""
        return _weights(self._last)

    @property
    def config(self) -> Mapping[str, JsonObject]:
        """The flags of the last source."""
        return self._last.config

    @property
    def kind(self) -> str:
        """The kind of model, equal for all sources."""
        return self._last.kind

    @property
    def progress(self) -> Mapping[str, int]:
        """The progress of the last source."""
        return self._last.progress

    @property
    def scalars(self) -> JsonObject:
        """Empty: there is no optimizer."""
        return {}

    def read(self, name: str, box: Box) -> Tensor:
        """Return the mean over all sources of the elements `box` of `name`, in its own dtype."""
        first = self._sources[0].read(name, box)
        wide = torch.promote_types(first.dtype, torch.float32)
        total = first.to(wide)
        for source in self._sources[1:]:
            total = total + source.read(name, box).to(wide)
        return (total / len(self._sources)).to(first.dtype)

    def verify(self, *, share: int = 0, of: int = 1) -> None:
        """Check the files of every source."""
        for source in self._sources:
            source.verify(share=share, of=of)


def _weights(source: CheckpointSource) -> dict[str, TensorDescription]:
    return {name: known for name, known in source.tensors.items() if name.startswith("model/")}


def _check_same_model(last: CheckpointSource, source: CheckpointSource) -> None:
    model_kind.refuse_kind(
        source.kind, last.kind, where=source.directory, wants=f"an average with {last.directory}"
    )
    expected, weights = _weights(last), _weights(source)
    problems = reshard.mismatches(weights, expected)
    problems += reshard.unexpected(weights, expected, ("model/",))
    last_fields, fields = _model_fields(last), _model_fields(source)
    problems += [
        f"--{name.replace('_', '-')}: {fields.get(name)}, "
        f"but {last_fields.get(name)} in {last.directory}"
        for name in sorted(last_fields.keys() | fields.keys())
        if last_fields.get(name) != fields.get(name)
    ]
    if problems:
        raise CheckpointError(
            "checkpoints of different models cannot be averaged",
            found=f"{source.directory}: " + "\n    ".join(problems[:8]),
            fix=f"average checkpoints of the same model as {last.directory}",
        )


def _model_fields(source: CheckpointSource) -> JsonObject:
    """Return the model's fields that affect its output, without those used in training only."""
    try:
        found = from_plain(ModelConfig, source.config.get("model", {})).meaning()
    except ConfigError:
        return {}  # the format does not record them; names and shapes are compared in any case
    return {name: value for name, value in found.items() if name not in _TRAINING_ONLY}


_TRAINING_ONLY = frozenset(
    {
        *("hidden_dropout", "attention_dropout", "init_method_std", "init_method_xavier_uniform"),
        "output_layer_init_method_std",
    }
)
