"""Makes one file of many: the files in the order given, a folder's in sorted order, line by line.

Every line is checked to be a JSON object with a text before it is copied, byte for byte.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.program import run_program
from tools.openwebtext.json_lines import (
    add_file_flags,
    check_outputs,
    json_line_files,
    line_of,
    print_counts,
    require_rows,
)
from tools.preprocessing.documents import DocumentFile, fields_of
from tools.preprocessing.text_output import AtomicTextFile


def main(argv: list[str] | None = None) -> None:
    """Copy all documents of all files into one."""
    args = _parse(argv)
    files = json_line_files(args.input)
    output = Path(args.output)
    check_outputs([output], files, overwrite=args.overwrite)
    counts: dict[str, int] = {}
    with AtomicTextFile(output) as file:
        for path in files:
            count = 0
            for row in DocumentFile(path, columns=[args.json_key]):
                fields_of(path, row, [args.json_key])
                file.write(line_of(row))
                count += 1
            counts[str(path)] = count
        require_rows(sum(counts.values()), args.input)
    print(f"{sum(counts.values())} documents of {len(files)} files in {output}, in this order:")
    print_counts(counts)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="merge_jsons.py", description="Make one file of JSON lines of many."
    )
    add_file_flags(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
