"""The only reader of files written with torch.save or pickle: tensors and plain values, no code.

torch's weights-only reader builds nothing but what an explicit list allows. The list below adds
what old training programs keep beside tensors: an argparse namespace, numpy's numbers and random
states, and enums of packages that are not installed here; for the latter inert stand-ins are built.
A file that names anything else is refused, with that name, before any of it runs.
"""

import argparse
import io
import pickle
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, TypeVar

import numpy as np
import torch

from megatron.checkpoint.files.durable import from_os_error
from megatron.checkpoint.files.file_window import FileWindow
from megatron.errors import CheckpointError

Value = TypeVar("Value")
_BLOCK_BYTES = 4 << 20
# Of a record's header in a zip archive: its bytes without name and extra, and where their lengths
# are in it.
_LOCAL_HEADER, _NAME_LENGTHS = 30, 26
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


class FilePath(Inert):
    """A path of the machine that wrote the file; its parts are not kept."""


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
PATHS: Mapping[str, Any] = {
    f"{module}.{name}": FilePath
    for module in ("pathlib", "pathlib._local")  # before and since Python 3.13
    for name in ("PosixPath", "PurePosixPath", "WindowsPath")
}
ALLOWED: Mapping[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": argparse.Namespace,
    **_ENUMS,
    **_NUMPY,
    **PATHS,
}
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
    return _guarded(path, lambda: _load(path, is_mapped(path), also or {}))


def load_window(window: FileWindow) -> Any:
    """Return the content of a torch.save archive that is a part of a file, read whole.

    Raises:
        CheckpointError: as `load`.
    """
    return _guarded(window, lambda: _load(window, False, {}))


def load_pickle(path: Path, allowed: Mapping[str, Any]) -> Any:
    """Return the content of a file written with pickle, without tensors.

    Args:
        allowed: all that the file may name, by dotted name. Only subclasses of `Inert`, types
            that cannot be changed, and values that cannot be called.

    Raises:
        CheckpointError: it is missing, damaged, or names what is not allowed. Nothing of it ran.
    """

    def read() -> Any:
        content = path.read_bytes()
        _check_lengths(content)
        return _ListedUnpickler(io.BytesIO(content), allowed).load()

    return _guarded(path, read)


class TensorRecord(NamedTuple):
    """Where in a file a tensor's elements are, and how they are laid out.

    `start` is the byte of the first element, from the start of the window; strides count elements.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


def tensor_record(window: FileWindow) -> TensorRecord:
    """Return the layout of the one tensor in a torch.save archive, without reading its elements.

    Raises:
        CheckpointError: it is damaged, not one tensor, or names what is not allowed.
    """
    return _guarded(window, lambda: _tensor_record(window))


def is_mapped(path: Path) -> bool:
    """Return whether `load` maps the tensors of this file instead of reading them."""
    return zipfile.is_zipfile(path)


def check(path: Path | FileWindow) -> None:
    """Compare every record with the checksum that torch.save keeps of it (since torch 1.6).

    Raises:
        CheckpointError: the file is damaged; the message names the record.
    """
    try:
        if isinstance(path, Path) and not is_mapped(path):
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


# Of each opcode: the bytes of its argument, or what `pickletools` has for one of another length.
_ARGUMENTS = {ord(o.code): 0 if o.arg is None else o.arg.n for o in pickletools.opcodes}
_LENGTHS = {  # the bytes of the number that tells the length of an argument
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_TWO_LINES = b"ci"  # GLOBAL and INST
_PUT, _LONG_BINPUT, _STOP = b"pr."


def _check_lengths(content: bytes) -> None:
    """Refuse a pickle that makes its reader allocate more than the file can fill.

    Python's reader makes room for as many bytes, and as many places to remember objects, as an
    opcode of five bytes tells it.
    """
    at, end = 0, len(content)
    while at < end and (opcode := content[at]) != _STOP:
        at += 1
        size = _ARGUMENTS.get(opcode)
        if size is None:
            raise pickle.UnpicklingError(f"no opcode {opcode:#x}")
        if size == pickletools.UP_TO_NEWLINE:
            start = at
            for _ in range(2 if opcode in _TWO_LINES else 1):
                at = content.index(b"\n", at) + 1
            place = int(content[start:at]) if opcode == _PUT else 0
        elif size < 0:
            width = _LENGTHS[size]
            at += width + int.from_bytes(content[at : at + width], "little")
            place = 0
        else:
            place = int.from_bytes(content[at : at + 4], "little") if opcode == _LONG_BINPUT else 0
            at += size
        if at > end or place > end:
            raise pickle.UnpicklingError(f"{max(at, place):,} bytes or places in a file of {end:,}")


class _ListedUnpickler(pickle.Unpickler):
    """A reader of pickles that builds nothing but what a list allows."""

    def __init__(self, file: BinaryIO, allowed: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """Return what the list has for a name; never imports anything."""
        dotted = f"{module}.{name}"
        if dotted not in self._allowed:
            raise pickle.UnpicklingError(f"GLOBAL {dotted} was not an allowed global")
        return self._allowed[dotted]


def _load(source: Any, mapped: bool, also: Mapping[str, Any]) -> Any:
    allowed: list[Any] = [(value, name) for name, value in {**ALLOWED, **also}.items()]
    with torch.serialization.safe_globals(allowed):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)


def _guarded(source: Path | FileWindow, read: Callable[[], Value]) -> Value:
    """Return what `read` returns, with every error as one that names the file."""
    try:
        return read()
    except OSError as error:
        raise from_os_error(error, "reading a file of a checkpoint") from error
    except Exception as error:  # torch, pickle and the values they build raise many kinds on damage
        raise _refusal(source, error) from error


def _tensor_record(window: FileWindow) -> TensorRecord:
    with zipfile.ZipFile(window) as archive:
        names = {record.filename.partition("/")[2]: record for record in archive.infolist()}
        storages = [name for name in names if re.fullmatch(r"data/\d+", name)]
        if len(storages) != 1 or names[storages[0]].compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{len(storages)} tensors, or compressed ones, where one should be")
        if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
            raise ValueError("elements that are not little-endian")
        start = names[storages[0]].header_offset
        stored_bytes = names[storages[0]].file_size
    with torch.serialization.skip_data():
        window.seek(0)
        tensor = _load(window, False, {})
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise ValueError(f"a {type(tensor).__name__} where a tensor should be")
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride()))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if tensor.numel() and needed > stored_bytes:
        raise ValueError(f"{stored_bytes} bytes for a tensor that needs {needed}")
    window.seek(start + _NAME_LENGTHS)
    name, extra = struct.unpack("<HH", window.read(4))
    start += _LOCAL_HEADER + name + extra + tensor.storage_offset() * tensor.element_size()
    return TensorRecord(tensor.dtype, tuple(tensor.shape), tensor.stride(), start)


def _refusal(path: Path | FileWindow, error: Exception) -> CheckpointError:
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
