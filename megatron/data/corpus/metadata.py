"""The sidecar `P.meta.json`: what an indexed corpus was made from.

The `.bin/.idx` pair records neither its tokenizer nor whether an item is a document or a sentence;
the sidecar does. It is optional: corpora of other tools have none.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from megatron import atomic
from megatron.data.corpus.paths import metadata_file_path
from megatron.errors import DataError

__all__ = [
    "FORMAT_VERSION",
    "CorpusMetadata",
    "ItemLevel",
    "digests_of_files",
    "metadata_file_path",
    "read_metadata",
    "write_metadata",
]

FORMAT_VERSION = 1
_ADDED_LATER = (
    "pair_id",
    "tokenizer_files",
    "sentence_splitter",
)  # a sidecar without them is an older one
_TOKENIZER_SUFFIXES = (".json", ".model", ".txt")  # beside them may lie gigabytes of a model
_TEXT = ("tokenizer_type", "level", "json_key", "pair_id", "sentence_splitter")


class ItemLevel(StrEnum):
    """What one item of the .idx file is."""

    DOCUMENT = "document"
    SENTENCE = "sentence"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusMetadata:
    """What a corpus was made from; the counts are filled in by the builder that writes it."""

    tokenizer_type: str
    vocab_size: int
    eod: int | None
    level: ItemLevel = ItemLevel.DOCUMENT
    json_key: str = "text"
    num_items: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    pair_id: str = ""  # of the checksums of the same corpus; "" where there are none
    tokenizer_files: Mapping[str, str] = field(default_factory=dict)  # file name to SHA-256
    sentence_splitter: str = ""  # and its version, of what made sentences; "" for documents
    format_version: int = FORMAT_VERSION


def write_metadata(prefix: str, metadata: CorpusMetadata) -> None:
    """Write the sidecar of `prefix`, atomically."""
    path = Path(metadata_file_path(prefix))
    temporary = atomic.temporary_name(path)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(metadata), file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        atomic.publish_file(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise atomic.write_error(path, error) from error


def read_metadata(prefix: str) -> CorpusMetadata | None:
    """Return the sidecar of `prefix`, or None where the corpus has none."""
    path = Path(metadata_file_path(prefix))
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from error
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise _unreadable(path, f"no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _unreadable(path, f"a JSON {type(fields).__name__} where an object should be")
    version = fields.get("format_version")
    if version != FORMAT_VERSION:
        raise _unreadable(path, f"format_version {version!r}, this program reads {FORMAT_VERSION}")
    # A sidecar may have further fields, which are ignored.
    names = [each.name for each in dataclasses.fields(CorpusMetadata)]
    known = [name for name in names if name in fields or name not in _ADDED_LATER]
    wrong = [name for name in known if not _fits(name, fields.get(name, dataclasses.MISSING))]
    if wrong:
        raise _unreadable(path, f"missing or of the wrong type: {', '.join(wrong)}")
    levels = tuple(level.value for level in ItemLevel)
    if fields["level"] not in levels:
        raise _unreadable(path, f"level {fields['level']!r}, expected one of {levels}")
    values = {name: fields[name] for name in known}
    return CorpusMetadata(**values | {"level": ItemLevel(fields["level"])})


def digests_of_files(paths: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of each file by name; of a folder, of its tokenizer files."""
    digests = {}
    for path in paths:
        inside = sorted(path.iterdir()) if path.is_dir() else []
        files = [each for each in inside if each.suffix in _TOKENIZER_SUFFIXES] or [path]
        for file in files:
            if file.is_file():
                digests[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests


def _fits(name: str, value: object) -> bool:
    if name == "eod" and value is None:
        return True
    if name == "tokenizer_files":
        return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    return isinstance(value, str if name in _TEXT else int) and not isinstance(value, bool)


def _unreadable(path: Path, found: str) -> DataError:
    return DataError(
        f"the sidecar of a corpus cannot be used: {path}",
        found=found,
        fix="write it again with tools/preprocess_data.py, or remove it: a corpus may have none",
    )
