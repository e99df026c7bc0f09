"""`manifest.json`: what a checkpoint holds, which file holds it, and every file's digest.

A folder without a valid manifest is not a checkpoint. People can read the text too: one line per
file and per tensor. It contains a digest of itself, which is verified before anything else is used.
No torch here.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import xxhash

from megatron.checkpoint import model_kind
from megatron.checkpoint.boxes import Box, format_box, tiling_fault, whole
from megatron.checkpoint.files.safetensors_header import ITEM_BYTES, tensor_bytes
from megatron.checkpoint.files.store import Place
from megatron.errors import CheckpointError
from megatron.json_values import JsonObject, JsonValue, parse_json
from megatron.mpu.topology import Topology

NAME = "manifest.json"
SEAL = "megatron.json"  # the same, beside files in another framework's layout
PART = "rank.json"  # the same of one rank's state alone, in a local checkpoint
FORMAT = "megatron-verified/sharded"
VERSION = 1
# One folder or one below it, no way out of it.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_DIGEST_LINE = '"manifest_xxh3": "{}"'

T = TypeVar("T")


class GridLayout(NamedTuple):
    """The grid of ranks that wrote a checkpoint."""

    tp: int
    pp: int
    dp: int
    cp: int = 1  # a manifest without it is of a run without context parallelism

    @classmethod
    def of(cls, grid: Topology) -> "GridLayout":
        """Return the layout of the ranks of a run."""
        return cls(**{axis: grid.size(axis) for axis in cls._fields})

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp * self.cp

    def __str__(self) -> str:
        context = f" cp={self.cp}" if self.cp > 1 else ""
        return f"tp={self.tp} pp={self.pp} dp={self.dp}{context}"


class FileRecord(NamedTuple):
    """Length and xxh3-128 digest of one file, of the bytes as they were written."""

    bytes: int
    xxh3: str


class SavedPiece(NamedTuple):
    """A box of a whole tensor, the file that holds it, and the digest of its data alone."""

    file: str
    box: Box
    xxh3: str


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A whole tensor and the pieces that make it up, each element in exactly one of them."""

    dtype_code: str
    global_shape: tuple[int, ...]
    pieces: tuple[SavedPiece, ...]

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of the pieces, in order."""
        return tuple(piece.box for piece in self.pieces)

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return tensor_bytes(self.dtype_code, self.global_shape)


@dataclass(frozen=True)
class Manifest:
    """One checkpoint, without its tensors' values.

    `generators` names one file per rank, in rank order; it is empty when none were saved.
    `written_by` maps "megatron" and "torch" to versions. `created` is UTC, ISO 8601.
    `validation_loss` is that of these weights, if they were evaluated. `model_kind` is what was
    trained (`PretrainTask.name`); None in checkpoints from before it was recorded.
    """

    iteration: int
    layout: GridLayout
    progress: Mapping[str, int]
    scalars: JsonObject
    config: Mapping[str, JsonObject]
    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, FileRecord]
    generators: tuple[str, ...]
    written_by: Mapping[str, str]
    created: str
    data: Mapping[str, str] = field(
        default_factory=dict
    )  # what was read: names of files to digests
    validation_loss: float | None = None
    model_kind: str | None = None

    @property
    def kind(self) -> str:
        """The kind of model: as recorded, else derived from the names of parameters."""
        return self.model_kind or model_kind.kind_from_names(self.tensors)

    @property
    def pp_before_dp(self) -> bool:
        """Whether ranks were numbered with stages nearer to each other than replicas."""
        parallel = self.config.get("parallel", {})
        return isinstance(parallel, Mapping) and bool(parallel.get("use_tp_pp_dp_mapping", False))

    @cached_property
    def config_fingerprint(self) -> str:
        """Sixteen hex digits that differ between any two different configs."""
        text = json.dumps(self.config, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def bytes(self) -> int:
        """Bytes of all files but the manifest itself."""
        return sum(record.bytes for record in self.files.values())


def entry_name(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """Return the key of a piece in its file: the tensor's name, plus the box unless whole."""
    return name if box == whole(shape) else f"{name}{format_box(box)}"


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as JSON text.

    Raises:
        CheckpointError: JSON cannot hold a value of progress, scalars or config exactly (NaN and
            infinities included).
    """
    try:
        head = json.dumps(_plain_head(manifest), indent=2, allow_nan=False)[1:-2]
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            "a value of this run cannot be written to a checkpoint",
            found=str(error),
            fix="keep NaN, infinities and objects out of progress, scalars and config",
        ) from error
    files = {name: record._asdict() for name, record in manifest.files.items()}
    tensors = {name: _plain_tensor(tensor) for name, tensor in manifest.tensors.items()}
    text = "\n".join(
        (
            "{" + head + ",",
            *_one_line_each("files", files),
            *_one_line_each("tensors", tensors),
            "  " + _DIGEST_LINE.format(""),
            "}\n",
        )
    )
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    return text.replace(_DIGEST_LINE.format(""), _DIGEST_LINE.format(digest)).encode()


def _plain_head(manifest: Manifest) -> JsonObject:
    return {
        "format": FORMAT,
        "version": VERSION,
        "iteration": manifest.iteration,
        "created": manifest.created,
        "written_by": dict(manifest.written_by),
        "layout": {**manifest.layout._asdict(), "world": manifest.layout.world},
        "progress": dict(manifest.progress),
        "scalars": dict(manifest.scalars),
        "config_fingerprint": manifest.config_fingerprint,
        "config": dict(manifest.config),
        "data": dict(manifest.data),
        "validation_loss": manifest.validation_loss,
        "model_kind": manifest.model_kind,
        "generators": list(manifest.generators),
    }


def _plain_tensor(tensor: SavedTensor) -> JsonObject:
    pieces: list[JsonObject] = [
        {"file": p.file, "offset": p.box.offset, "shape": p.box.shape, "xxh3": p.xxh3}
        for p in tensor.pieces
    ]
    return {"dtype": tensor.dtype_code, "shape": tensor.global_shape, "pieces": pieces}


def _one_line_each(title: str, values: JsonObject) -> list[str]:
    lines = [f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
    return [f'  "{title}": {{', ",\n".join(lines), "  },"] if lines else [f'  "{title}": {{}},']


def load(directory: Place) -> tuple[Manifest, str]:
    """Return the manifest in `directory`, and the digest of its text by which ranks compare.

    Raises:
        CheckpointError: it is missing, damaged, of a newer version, or contradicts itself.
    """
    path = directory / NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise missing(directory) from error
    return decode(text, path), str(xxhash.xxh3_128_hexdigest(text))


def load_seal(directory: Place) -> Manifest | None:
    """Return our manifest of a folder in another framework's layout, or None without one.

    Raises:
        CheckpointError: as for `load`, except for a missing file.
    """
    path = directory / SEAL
    return decode(path.read_bytes(), path) if path.is_file() else None


def load_part(directory: Path) -> Manifest:
    """Return the manifest of one rank's state: its tensors are parts, and generators its own.

    Raises:
        CheckpointError: as for `load`.
        OSError: it cannot be read.
    """
    path = directory / PART
    return decode(path.read_bytes(), path, of_one_rank=True)


def missing(directory: Place) -> CheckpointError:
    """Return the error for the folder of an iteration in which there is no manifest."""
    names = ", ".join(sorted(entry.name for entry in directory.iterdir())[:5])
    return CheckpointError(
        "a checkpoint folder has no manifest",
        found=f"{directory / NAME}: no such file; beside it: {names or 'nothing'}",
        fix="without it the other files cannot be identified: copy the folder whole, with that "
        "file, or load another iteration",
    )


def decode(text: bytes, path: Place, *, of_one_rank: bool = False) -> Manifest:
    """Return the manifest parsed from `text`; `path` is for messages.

    Args:
        of_one_rank: it describes what one rank holds, and not all of every tensor.

    Raises:
        CheckpointError: as for `load`.
    """
    parser = _Parser(path, of_one_rank=of_one_rank)
    fields = parser.json(text)
    kind, version = fields.get("format"), fields.get("version")
    if kind != FORMAT or type(version) is not int:
        raise parser.error(f"format {kind!r} version {version!r}, expected {FORMAT} {VERSION}")
    if version > VERSION:
        raise CheckpointError(
            "the checkpoint is of a newer version than this program reads",
            found=f"{path}: version {version}, this program reads up to {VERSION}",
            fix="update this program, or load an older checkpoint",
        )
    parser.check_digest(text, fields)
    return parser.manifest(fields)


class _Parser:
    """Turns JSON values into a manifest and refuses whatever is not exactly as `encode` writes."""

    def __init__(self, path: Place, *, of_one_rank: bool = False) -> None:
        self._path, self._of_one_rank = path, of_one_rank

    def error(self, found: str) -> CheckpointError:
        return CheckpointError(
            "the manifest of a checkpoint is damaged or was edited",
            found=f"{self._path}: {found}",
            fix="load an older iteration, or copy the checkpoint again",
        )

    def json(self, text: bytes) -> JsonObject:
        try:
            fields = parse_json(text)
        except (ValueError, RecursionError) as error:
            raise self.error(f"not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise self.error("not an object")
        return fields

    def check_digest(self, text: bytes, fields: JsonObject) -> None:
        recorded = str(fields.get("manifest_xxh3"))
        blank = text.replace(
            _DIGEST_LINE.format(recorded).encode(), _DIGEST_LINE.format("").encode()
        )
        found = xxhash.xxh3_128_hexdigest(blank)
        if blank == text or found != recorded:
            raise self.error(f"digest {found}, expected {recorded[:40]}")

    def manifest(self, fields: JsonObject) -> Manifest:
        get = self.get
        files = {
            self.file_name(name): FileRecord(
                self.natural(get(value, "bytes", int, name), name), self.digest(value, name)
            )
            for name, value in get(fields, "files", dict).items()
        }
        layout = get(fields, "layout", dict)
        manifest = Manifest(
            iteration=self.natural(get(fields, "iteration", int), "iteration"),
            layout=GridLayout(
                **{
                    axis: get(layout, axis, int, "layout")
                    for axis in GridLayout._fields
                    if axis in layout or axis not in GridLayout._field_defaults
                }
            ),
            progress=get(fields, "progress", dict),
            scalars=get(fields, "scalars", dict),
            config=get(fields, "config", dict),
            tensors={
                name: self.tensor(name, value, files)
                for name, value in get(fields, "tensors", dict).items()
            },
            files=files,
            generators=tuple(get(fields, "generators", list)),
            written_by=get(fields, "written_by", dict),
            created=get(fields, "created", str),
            data=get(fields, "data", dict) if "data" in fields else {},
            validation_loss=None
            if fields.get("validation_loss") is None
            else get(fields, "validation_loss", float),
            model_kind=None if fields.get("model_kind") is None else get(fields, "model_kind", str),
        )
        if min(manifest.layout) < 1 or layout.get("world") != manifest.layout.world:
            raise self.error(f"layout {layout}")
        described = 1 if self._of_one_rank else manifest.layout.world
        if manifest.generators and len(manifest.generators) != described:
            raise self.error(f"{len(manifest.generators)} generator files in layout {layout}")
        for name in manifest.generators:
            if not isinstance(name, str) or name not in files:
                raise self.error(f"generators in {name!r}, which is no file of it")
        if get(fields, "config_fingerprint", str) != manifest.config_fingerprint:
            raise self.error("a config that does not match its fingerprint")
        return manifest

    def tensor(self, name: str, value: JsonValue, files: Mapping[str, FileRecord]) -> SavedTensor:
        dtype = self.get(value, "dtype", str, name)
        if dtype not in ITEM_BYTES:
            raise self.error(f"{name} has the unknown dtype {dtype!r}")
        shape = self.integers(self.get(value, "shape", list, name), name)
        pieces = []
        for piece in self.get(value, "pieces", list, name):
            file = self.get(piece, "file", str, name)
            if file not in files:
                raise self.error(f"{name} lies in {file!r}, which is no file of it")
            offset = self.integers(self.get(piece, "offset", list, name), name)
            box = Box(offset, self.integers(self.get(piece, "shape", list, name), name))
            pieces.append(SavedPiece(file, box, self.digest(piece, name)))
        fault = tiling_fault([piece.box for piece in pieces], shape)
        if fault is not None and not self._of_one_rank:
            raise self.error(f"the pieces of {name} do not make it up: {fault}")
        return SavedTensor(dtype, shape, tuple(pieces))

    def get(self, value: JsonValue, key: str, kind: type[T], where: str = "the top level") -> T:
        found = value.get(key) if isinstance(value, dict) else None
        if not isinstance(found, kind) or type(found) is not kind:
            raise self.error(f"no {kind.__name__} called {key!r} in {where}")
        return found

    def natural(self, value: int, where: str) -> int:
        if value < 0:
            raise self.error(f"{value} in {where}")
        return value

    def integers(self, values: list[JsonValue], where: str) -> tuple[int, ...]:
        integers = tuple(value for value in values if type(value) is int and value >= 0)
        if len(integers) != len(values):
            raise self.error(f"{values} in {where}")
        return integers

    def digest(self, value: JsonValue, where: str) -> str:
        text = self.get(value, "xxh3", str, where)
        if not _DIGEST.fullmatch(text):
            raise self.error(f"digest {text[:40]!r} in {where}")
        return text

    def file_name(self, name: str) -> str:
        if not _FILE_NAME.fullmatch(name) or ".." in name:
            raise self.error(f"the file name {name!r}, which may lead out of the checkpoint")
        return name
