"""Maps saved bytes to tensors to fill, for any two layouts. Pure arithmetic.

A load at the layout of the save, a load at another one and an offline conversion use the same plan;
no other module computes such overlaps. The formats read the bytes.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from megatron.checkpoint.boxes import Box, format_box, overlap
from megatron.errors import CheckpointError

_SHOWN = 8  # problems listed before "and N more"


class CopyStep(NamedTuple):
    """Elements `box` (global indices) go from saved piece `saved` to wanted box `wanted`."""

    saved: int
    wanted: int
    box: Box


class TensorFacts(Protocol):
    """The properties by which saved and wanted tensors are compared."""

    @property
    def dtype_code(self) -> str:
        """The safetensors name of the element type."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, without padding rows."""


def plan(name: str, saved: Sequence[Box], wanted: Sequence[Box]) -> list[CopyStep]:
    """Return the copies that fill every element of every wanted box exactly once.

    Raises:
        CheckpointError: the saved pieces hold some wanted element never, or more than once.
    """
    copies = []
    for w, target in enumerate(wanted):
        found = [
            CopyStep(s, w, common)
            for s, piece in enumerate(saved)
            if (common := overlap(piece, target)) is not None
        ]
        total = sum(copy.box.size for copy in found)
        if total != target.size:
            raise CheckpointError(
                f"the pieces of {name} in the checkpoint do not make up what this rank needs",
                found=f"{total} elements saved for the {target.size} of {name}{format_box(target)}",
                fix="the checkpoint is damaged: load an older iteration",
            )
        copies += found
    return copies


def mismatches(
    saved: Mapping[str, TensorFacts], wanted: Mapping[str, TensorFacts], *, cast: bool = False
) -> list[str]:
    """Return why `wanted` cannot be filled: missing names, other shapes, other dtypes."""
    problems = []
    for name, target in wanted.items():
        source = saved.get(name)
        if source is None:
            problems.append(f"missing: {name}{_nearest(name, saved)}")
        elif source.global_shape != target.global_shape:
            problems.append(
                f"shape: {name} is {list(source.global_shape)} in the checkpoint and "
                f"{list(target.global_shape)} in this run"
            )
        elif source.dtype_code != target.dtype_code and not cast:
            problems.append(
                f"dtype: {name} is {source.dtype_code} in the checkpoint and "
                f"{target.dtype_code} in this run"
            )
    return problems


def unexpected(
    saved: Iterable[str], wanted: Collection[str], prefixes: tuple[str, ...]
) -> list[str]:
    """Return saved names under `prefixes` that no rank loads."""
    return [
        f"unexpected: {name}{_nearest(name, wanted)}"
        for name in saved
        if name.startswith(prefixes) and name not in wanted
    ]


def mismatch_error(problems: Sequence[str]) -> CheckpointError:
    """Return one error that lists `problems`."""
    lines = list(problems[:_SHOWN])
    if len(problems) > _SHOWN:
        lines.append(f"and {len(problems) - _SHOWN} more")
    return CheckpointError(
        "the checkpoint is of another model or optimizer than this run",
        found="\n    ".join(lines),
        fix="give the flags of the run that wrote it (tools/inspect_checkpoint.py shows them), "
        "or load another checkpoint",
    )


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=2, cutoff=0.8)
    return f" (nearest: {', '.join(close)})" if close else ""
