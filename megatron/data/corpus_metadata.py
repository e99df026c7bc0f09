"""The sidecar `P.meta.json`: what an indexed corpus was made from.

The `.bin/.idx` pair says nothing about its tokenizer or about whether an item is a document or a
sentence; the sidecar does. It is optional: corpora of other tools have none.
"""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from megatron import atomic
from megatron.errors import DataError

FORMAT_VERSION = 1
LEVELS = ("document", "sentence")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusMetadata:
    """What a corpus was made from; the counts are filled in by the builder that writes it."""

    tokenizer_type: str
    vocab_size: int
    eod: int | None
    level: str = "document"  # what one item of the .idx is: one of LEVELS
    json_key: str = "text"
    num_items: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    format_version: int = FORMAT_VERSION


def metadata_file_path(prefix: str) -> str:
    """Path of the sidecar of the corpus `prefix`."""
    return prefix + ".meta.json"


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
        atomic.publish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise atomic.write_error(path, error) from error


def read_metadata(prefix: str) -> CorpusMetadata | None:
    """The sidecar of `prefix`, or None where the corpus has none."""
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
    # A sidecar may grow fields (checksums): those that are not ours to read are left alone.
    known = {field.name: field for field in dataclasses.fields(CorpusMetadata)}
    wrong = [name for name, field in known.items() if not _fits(fields, field)]
    if wrong:
        raise _unreadable(path, f"missing or of the wrong type: {', '.join(wrong)}")
    metadata = CorpusMetadata(**{name: fields[name] for name in known})
    if metadata.level not in LEVELS:
        raise _unreadable(path, f"level {metadata.level!r}, expected one of {LEVELS}")
    return metadata


def _fits(fields: dict[str, object], field: "dataclasses.Field[object]") -> bool:
    value = fields.get(field.name, dataclasses.MISSING)
    if field.name == "eod" and value is None:
        return True
    expected = str if field.name in ("tokenizer_type", "level", "json_key") else int
    return isinstance(value, expected) and not isinstance(value, bool)


def _unreadable(path: Path, found: str) -> DataError:
    return DataError(
        f"the sidecar of a corpus cannot be used: {path}",
        found=found,
        fix="write it again with tools/preprocess_data.py, or remove it: a corpus may have none",
    )
