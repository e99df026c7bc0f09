"""A checkpoint of any format, opened for reading: whole tensors under our names, box by box.

Loads and conversions use only this interface. A source translates names, layouts and shards of its
format; it needs no process group and holds only requested tensors in memory. `formats/registry.py`
lists the formats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from torch import Tensor

from megatron.checkpoint import model_kind
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.files.mapped_tensors import TensorRange
from megatron.checkpoint.folder.manifest import Manifest
from megatron.config.checkpoint import MegatronNames
from megatron.json_values import JsonObject


class TensorDescription(NamedTuple):
    """The element type and whole shape of a tensor, equal on all ranks."""

    dtype_code: str  # the safetensors name, such as BF16
    global_shape: tuple[int, ...]


class CheckpointSource(Protocol):
    """A checkpoint of one format, opened for reading; a context manager that closes its files.

    Names are those of our own checkpoints: `model/<parameter>`, and `optimizer/<kind>/<parameter>`
    with the kinds of `MegatronOptimizer.named_state`. Shapes are those of whole tensors without
    padding rows, in our layout of heads and gated halves.
    """

    format_name: str
    directory: Path

    @property
    def seal(self) -> Manifest | None:
        """Our manifest beside files of another format; None if there is none."""

    @property
    def tensors(self) -> Mapping[str, TensorDescription]:
        """Dtype and whole shape of everything that can be read, by our names, in model order."""

    @property
    def config(self) -> Mapping[str, JsonObject]:
        """Groups of `RunConfig.to_plain()`, with the fields that the format records."""

    @property
    def progress(self) -> Mapping[str, int]:
        """`Progress.to_plain()` as far as the format records it; empty for bare weights."""

    @property
    def kind(self) -> str:
        """The kind of model, as in `model_kind`; if not recorded, derived from names."""

    @property
    def scalars(self) -> JsonObject:
        """The values of `EngineState.scalars`; empty for bare weights."""

    def read(self, name: str, box: Box) -> Tensor:
        """Return the elements `box` of the whole tensor `name`, on the CPU, in its own dtype.

        Raises:
            CheckpointError: the file is damaged, or does not comply with its format.
        """

    def range_of(self, name: str) -> TensorRange | None:
        """Return where the whole tensor `name` lies as it is, row-major; None if nowhere."""

    def verify(self, *, share: int = 0, of: int = 1) -> None:
        """Check part `share` of `of` parts of the files, as far as the format allows.

        Raises:
            CheckpointError: a file is damaged; the message names it.
        """

    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> Self:
        """Return the source itself."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""


class _Named(Protocol):
    seal: Manifest | None

    @property
    def tensors(self) -> Mapping[str, TensorDescription]: ...


class SourceBase:
    """Default methods of a source: nothing to close, no digests, the kind by names."""

    seal: Manifest | None = None

    @property
    def kind(self: "_Named") -> str:
        """The kind of model: recorded by a run of ours, or derived from names of parameters."""
        recorded = None if self.seal is None else self.seal.model_kind
        return recorded or model_kind.kind_from_names(self.tensors)

    def range_of(self, name: str) -> TensorRange | None:
        """Return None: tensors are made of parts, or their files are no plain bytes."""
        return None

    def verify(self, *, share: int = 0, of: int = 1) -> None:
        """Do nothing: the format has no digests or checksums."""

    def close(self) -> None:
        """Do nothing: no file stays open between reads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Facts about a checkpoint of another tool that its files may lack.

    `vocab_size` is the number of tokens: a source with padding rows that it cannot identify leaves
    out the rows beyond it. None: every row counts.
    """

    vocab_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options of writing a checkpoint by one process; a format ignores those that it does not use.

    `iteration` is that of the source where None. `tokenizer` is a folder of tokenizer files, for
    formats that keep them beside the weights; without it they are those of the source's config, or
    none where `copy_tokenizer` is off. `dtype` (a safetensors code such as BF16) is what weights
    are rounded to; None keeps their dtype. `family` names the kind of model, for a format that has
    several; None: the first that fits. `megatron_names` are the names of parameters in Megatron's
    files of ranks.
    """

    iteration: int | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_stages: int = 1
    megatron_names: MegatronNames = MegatronNames.LEGACY
    make_vocab_size_divisible_by: int = 128
    optimizer: bool = True
    tokenizer: Path | None = None
    copy_tokenizer: bool = True
    dtype: str | None = None
    family: str | None = None
    max_shard_bytes: int | None = None

    def iteration_of(self, source: CheckpointSource) -> int:
        """Return the iteration to write: the option's, or the source's, or 0."""
        if self.iteration is not None:
            return self.iteration
        return int(source.progress.get("iteration", 0))
