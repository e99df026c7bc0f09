"""The only reader of files written with torch.save: tensors and plain values, no code.

torch's weights-only reader builds nothing but what an explicit list allows. The list below adds
what old training programs keep beside tensors: an argparse namespace, numpy's numbers and random
states, and enums of packages that are not installed here; for the latter inert stand-ins are built.
A file that names anything else is refused, with that name, before any of it runs.
"""

import argparse
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from megatron.checkpoint.files.durable import from_os_error
from megatron.errors import CheckpointError

_BLOCK_BYTES = 4 << 20
_REFUSED_NAMES = (
    re.compile(r"GLOBAL ([\w.<>]+) was not an allowed"),
    re.compile(r"unsupported GLOBAL ([\w.<>]+)"),
    re.compile(r"unrecognized function (.+)"),
    re.compile(r"but got (<class .+>)"),
)


class EnumValue(NamedTuple):
    """A member of an enum whose class is not installed: the class's name and the member's value."""

    kind: str
    value: Any


def enum_of(kind: str) -> Callable[[Any], EnumValue]:
    """Return a function that builds stand-ins for members of the enum `kind` (a dotted name)."""

    def build(value: Any) -> EnumValue:
        return EnumValue(kind, value)

    return build


class Inert:
    """An object of a class that is not installed; `vars` gives the state it was saved with."""

    def __new__(cls, *_: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        """Ignore the arguments of the class."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(name): value for name, value in state.items()})


# Enums that Megatron-LM, Megatron-DeepSpeed and bigscience keep in `args`, by dotted name.
_ENUM_MODULES: Mapping[str, tuple[str, ...]] = {
    "megatron.enums": ("PositionEmbeddingType",),
    "megatron.model.enums": ("PositionEmbeddingType", "ModelType", "AttnMaskType", "AttnType"),
    "megatron.core.enums": ("ModelType", "Fp8Recipe"),
    "megatron.core.transformer.enums": ("AttnBackend", "AttnMaskType", "AttnType", "LayerType"),
    "megatron.core.rerun_state_machine": ("RerunMode", "RerunState", "RerunDiagnostic"),
    "signal": ("Signals",),
}
_ENUMS = {
    f"{module}.{name}": enum_of(f"{module}.{name}")
    for module, names in _ENUM_MODULES.items()
    for name in names
}


class NumpyType(Inert):
    """The type of numpy values, by the code that numpy pickles: `f8`, `u4`."""

    def __init__(self, code: str = "", *_: Any) -> None:
        self.code = str(code)


class NumpyArray(Inert):
    """A numpy array whose bytes are not read: a random state."""


def _array(*_: Any) -> NumpyArray:
    return NumpyArray()


def _scalar(kind: NumpyType, data: bytes = b"") -> Any:
    """Return the number that a numpy scalar holds, as Python's."""
    if not _PLAIN_CODE.fullmatch(kind.code):
        raise ValueError(f"a numpy value of type {kind.code!r}")
    return np.frombuffer(data, dtype=np.dtype(kind.code), count=1)[0].item()


_PLAIN_CODE = re.compile("b1|[iu][1248]|f[248]")
_NUMPY: Mapping[str, Any] = {
    "numpy.dtype": NumpyType,
    "numpy.ndarray": NumpyArray,
    # before and since numpy 2
    **dict.fromkeys(("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"), _scalar),
    **dict.fromkeys(
        ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"), _array
    ),
}
ALLOWED: Mapping[str, Any] = {"argparse.Namespace": argparse.Namespace, **_ENUMS, **_NUMPY}
"""What a file may ask for beside tensors, and what it gets: nothing here calls anything else."""


def load(path: Path, *, also: Mapping[str, Any] | None = None) -> Any:
    """Return the content of a torch.save file, tensors on the CPU and mapped where possible.

    A mapped tensor is read when it is used, and must not be written to. Files from before
    torch 1.6 cannot be mapped and are read whole.

    Args:
        also: more classes and functions that the file may name, by dotted name; what they build
            must be as inert as what `ALLOWED` builds.

    Raises:
        CheckpointError: it is missing, damaged, or names what is not allowed. Nothing of it ran.
    """
    allowed: list[Any] = [(value, name) for name, value in {**ALLOWED, **(also or {})}.items()]
    try:
        mapped = is_mapped(path)
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise from_os_error(error, "reading a file of a checkpoint") from error
    except Exception as error:  # torch and the values it builds raise many kinds on damage
        raise _refusal(path, error) from error


def is_mapped(path: Path) -> bool:
    """Return whether `load` maps the tensors of this file instead of reading them."""
    return zipfile.is_zipfile(path)


def check(path: Path) -> None:
    """Compare every record with the checksum that torch.save keeps of it (since torch 1.6).

    Raises:
        CheckpointError: the file is damaged; the message names the record.
    """
    try:
        if not is_mapped(path):
            return  # the older layout has no checksums
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                with archive.open(record) as stream:
                    while stream.read(_BLOCK_BYTES):  # raises at the end if the sum is another
                        pass
    except OSError as error:
        raise from_os_error(error, "reading a file of a checkpoint") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        raise CheckpointError(
            "a checkpoint file is damaged",
            found=f"{path}: {error}",
            fix="copy it again from where it is whole, or use an older checkpoint",
        ) from error


def _refusal(path: Path, error: Exception) -> CheckpointError:
    text = str(error)
    for pattern in _REFUSED_NAMES:
        if match := pattern.search(text):
            return CheckpointError(
                "a checkpoint file names code that it is not allowed to run",
                found=f"{path} names {match[1].strip()}; nothing of it was run",
                fix="do not trust the file; if it is yours, save it again with tensors and plain "
                "values only",
            )
    line = (text.splitlines() or [""])[0][:200]
    return CheckpointError(
        "a checkpoint file cannot be read as tensors and plain values",
        found=f"{path}: {type(error).__name__}: {line}",
        fix="the file is damaged, or was not written by torch.save: copy it again",
    )
