"""Gives each document an id, PREFIX-0000000001 and on, in the order of the input.

Several files, or a folder, become one file with one numbering. A document that has the key already
is an error: ids that others refer to are not replaced.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.errors import DataError
from megatron.program import run_program
from tools.openwebtext.json_lines import (
    add_file_flags,
    check_outputs,
    json_line,
    json_line_files,
    require_rows,
)
from tools.preprocessing.documents import DocumentFile, record_of
from tools.preprocessing.text_output import AtomicTextFile

_DIGITS = 10  # as many as Megatron writes


def main(argv: list[str] | None = None) -> None:
    """Copy all documents with an id."""
    args = _parse(argv)
    files = json_line_files(args.input)
    output = Path(args.output)
    check_outputs([output], files, overwrite=args.overwrite)
    count = 0
    with AtomicTextFile(output) as file:
        for path in files:
            for row in DocumentFile(path, columns=[args.json_key]):
                record = record_of(path, row)
                if args.id_key in record:
                    raise DataError(
                        f"the document has a value under {args.id_key!r} already",
                        found=f"{path}:{row.line}: {record[args.id_key]!r}",
                        fix="choose another --id-key, or remove the ids that are there",
                    )
                count += 1
                file.write(json_line({args.id_key: f"{args.prefix}-{count:0{_DIGITS}}"} | record))
        require_rows(count, args.input)
    print(f"{count} documents of {len(files)} files in {output}, ids under {args.id_key!r}")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="add_id.py", description="Give each document an id, in the order of the input."
    )
    add_file_flags(parser)
    add = parser.add_argument
    add("--prefix", "--id-prefix", required=True, help="what each id begins with")
    add("--id-key", default="id", metavar="KEY", help="of the id; Megatron's: adlr_id [id]")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
