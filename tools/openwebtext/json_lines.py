"""What the tools for web text share: files of JSON lines in, files of lines out, flags for both.

A kept document is written as the bytes it was read as. What a reader would get wrong: of a
`.parquet` file only the column of the text is read, so only that is written.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.errors import ConfigError, DataError
from tools.preprocessing.documents import DocumentRow, find_inputs, is_text
from tools.preprocessing.text_output import refuse_existing_texts


def add_file_flags(parser: argparse.ArgumentParser) -> None:
    """Add --input, --output, --json-key and --overwrite."""
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=".jsonl or .json files of one object a line (.gz, .zst), .parquet files, or folders "
        "of them, in sorted order",
    )
    add("--output", required=True, help=".jsonl to write")
    # Errors about rows name --json-keys, the flag of preprocess_data.py.
    add("--json-key", "--json-keys", default="text", metavar="KEY", help="of the text [text]")
    add("--overwrite", action="store_true", help="replace outputs that exist")


def json_line_files(given: Sequence[str]) -> tuple[Path, ...]:
    """Return the files to read, in order; each holds rows that are JSON objects."""
    files = find_inputs(given).files
    for path in files:
        if is_text(path):
            raise ConfigError(
                "documents are read from JSON lines", found=str(path), fix="write them as .jsonl"
            )
    return files


def check_outputs(outputs: Sequence[Path], inputs: Sequence[Path], *, overwrite: bool) -> None:
    """Refuse outputs that exist, that are an input, or that are one file under two names."""
    seen = {path.resolve(): "an input" for path in inputs}
    for path in outputs:
        if path.resolve() in seen:
            raise ConfigError(
                "an output would be written over another file of this run",
                found=f"{path}, which is {seen[path.resolve()]} too",
                fix="choose another name for the output, outside of the folder that is read",
            )
        seen[path.resolve()] = "another output"
    refuse_existing_texts(outputs, overwrite=overwrite)


def require_rows(count: int, given: Sequence[str]) -> None:
    """Refuse an input without rows: more likely a wrong path than an empty corpus."""
    if not count:
        raise DataError("the input holds no document", found=" ".join(given), fix="check --input")


def line_of(row: DocumentRow) -> bytes:
    """Return the row with its original text and one line end."""
    return row.data.rstrip(b"\r\n") + b"\n"


def json_line(record: Mapping[str, object]) -> bytes:
    """Return the object as a line of ASCII, which can hold every JSON string."""
    return json.dumps(record).encode() + b"\n"


def print_counts(counts: Mapping[str, int]) -> None:
    """Print one line for each count, with aligned numbers."""
    width = max((len(str(count)) for count in counts.values()), default=0)
    for name, count in counts.items():
        print(f"  {count:>{width}} {name}")
