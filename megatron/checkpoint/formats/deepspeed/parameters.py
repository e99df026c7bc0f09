"""The record of our parameters inside DeepSpeed's files.

DeepSpeed's files hold flat ranges under DeepSpeed's own names and nothing about tensor parallelism.
So a save of ours puts a `RunRecord` beside them, in plain values; for files without one `names`
has the same facts about the Megatron family.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.checkpoint.folder.manifest import GridLayout
from megatron.checkpoint.formats.megatron.names import has_vocabulary_rows
from megatron.errors import CheckpointError
from megatron.json_values import JsonObject
from megatron.mpu import partition as partitions
from megatron.mpu.partition import Partition, init_of, partition_of

RECORD = "megatron_verified"  # our key in DeepSpeed's client state
RECORD_VERSION = 1
UNIVERSAL_INFO = "universal_checkpoint_info"  # DeepSpeed's key for the input of its own converter
_UNIVERSAL_VERSION = 0.2


@dataclass(frozen=True, slots=True)
class KnownParameter:
    """The parameter of ours that one of DeepSpeed's names stands for, and how it is split.

    `shape` is that of the whole, without padding rows; None: as stored. `tied` copies on several
    pipeline stages must be equal; of other copies of one name only the first is used.
    """

    name: str
    partition: Partition | None = None
    shape: tuple[int, ...] | None = None
    tied: bool = False


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The record in DeepSpeed's client state by which a run of any layout reads a save of ours.

    `parameters` are those of all ranks, by DeepSpeed's names; `order` are the names of one
    model-parallel rank as its optimizer numbers them, which DeepSpeed does not write without ZeRO.
    """

    iteration: int
    layout: GridLayout
    progress: Mapping[str, int]
    config: Mapping[str, JsonObject]
    scalars: JsonObject
    parameters: Mapping[str, KnownParameter]
    order: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Return lists, dicts, numbers and text, which a weights-only reader accepts."""
        return {
            "version": RECORD_VERSION,
            "iteration": self.iteration,
            "layout": dict(self.layout._asdict()),
            "progress": dict(self.progress),
            "config": dict(self.config),
            "scalars": dict(self.scalars),
            "parameters": {name: _plain(known) for name, known in self.parameters.items()},
            "order": list(self.order),
        }

    @classmethod
    def from_plain(cls, values: Any) -> "RunRecord":
        """Undo `to_plain`.

        Raises:
            CheckpointError: the record is of a newer version, or not one of ours.
        """
        version = values.get("version") if isinstance(values, Mapping) else None
        if type(version) is not int or version > RECORD_VERSION:
            raise CheckpointError(
                "the record of this program in a DeepSpeed checkpoint is not one that it reads",
                found=f"version {version!r}, expected {RECORD_VERSION}",
                fix="update this program, or load another checkpoint",
            )
        try:
            return cls(
                iteration=values["iteration"],
                layout=GridLayout(**values["layout"]),
                progress=values["progress"],
                config=values["config"],
                scalars=values["scalars"],
                parameters={n: _known(v) for n, v in values["parameters"].items()},
                order=tuple(values["order"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                "the record of this program in a DeepSpeed checkpoint is damaged",
                found=f"{type(error).__name__}: {error}",
                fix="load another checkpoint",
            ) from error


def describe_parameter(
    name: str, parameter: Tensor, local_shape: Sequence[int], *, tp: int, tied: bool = False
) -> KnownParameter:
    """Return the facts about a live parameter of ours, from the attributes it carries.

    Args:
        local_shape: of this rank's part; under ZeRO-3 the tensor itself is empty most of the time.
    """
    partition, init = partition_of(parameter), init_of(parameter)
    shape = partitions.global_shape(local_shape, partition, tp)
    if init is not None and init.true_rows is not None:
        shape = (init.true_rows, *shape[1:])
    return KnownParameter(name, partition, shape=shape, tied=tied)


def universal_info(parameters: Mapping[str, KnownParameter]) -> dict[str, Any]:
    """Return the input for `parameters` of DeepSpeed's own converter to its universal layout.

    Without it that converter joins every split parameter along dimension 0, halves of gated units
    and replicated tables included.
    """
    rows = [n for n, p in parameters.items() if p.partition is not None and p.partition.dim == 1]
    halves = [n for n, p in parameters.items() if p.partition and p.partition.blocks == 2]
    info: dict[str, Any] = {
        "universal_checkpoint_version": _UNIVERSAL_VERSION,
        "parameter_with_row_parallelism_patterns": _patterns(rows),
        "parameter_with_2_sub_params_cat_dim_0": _patterns(halves),
        "tp_replicated_parameter_patterns": _patterns(
            n for n, p in parameters.items() if p.partition is None
        ),
        "pipeline_replicated_parameter_patterns": _patterns(
            n for n, p in parameters.items() if p.tied
        ),
    }
    tables = {
        n: p.shape[0] for n, p in parameters.items() if has_vocabulary_rows(p.name) and p.shape
    }
    if tables:
        info["vocabulary_parameter_patterns"] = _patterns(tables)
        info["original_vocab_size"] = max(tables.values())
    return info


def merged(records: Iterable[Mapping[str, KnownParameter]]) -> dict[str, KnownParameter]:
    """Return the parameters of several ranks as one mapping.

    Raises:
        CheckpointError: two ranks differ about one of DeepSpeed's names.
    """
    result: dict[str, KnownParameter] = {}
    for record in records:
        for name, known in record.items():
            if result.setdefault(name, known) != known:
                raise CheckpointError(
                    "ranks disagree about a parameter to save",
                    found=f"{name}: {result[name]} and {known}",
                    fix="start all ranks with the same flags and the same code",
                )
    return result


def _plain(known: KnownParameter) -> dict[str, Any]:
    part = known.partition
    return {
        "name": known.name,
        "dim": None if part is None else part.dim,
        "blocks": 1 if part is None else part.blocks,
        "shape": None if known.shape is None else list(known.shape),
        "tied": known.tied,
    }


def _known(values: Mapping[str, Any]) -> KnownParameter:
    dim, shape = values["dim"], values["shape"]
    return KnownParameter(
        values["name"],
        None if dim is None else Partition("tp", dim=dim, blocks=values["blocks"]),
        None if shape is None else tuple(shape),
        values["tied"],
    )


def _patterns(names: Iterable[str]) -> list[str]:
    """Return regular expressions that match exactly `names`, for `re.match`."""
    return [re.escape(name) + "$" for name in names]
