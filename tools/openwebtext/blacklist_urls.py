"""Leaves out the URLs that are not worth fetching, and counts them by reason; the order stays.

What is refused is decided in `tools.openwebtext.urls`. A list that is given replaces the small one
that stands there; an empty file is an empty list.
"""

import argparse
import contextlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.errors import ConfigError, DataError
from megatron.program import run_program
from tools.openwebtext.json_lines import check_outputs, print_counts
from tools.openwebtext.urls import (
    DOMAINS,
    EXTENSIONS,
    REASONS,
    Blacklist,
    UrlFilter,
    listed_entries,
)
from tools.preprocessing.documents import DocumentFile, TextRule, find_inputs, is_text
from tools.preprocessing.text_output import AtomicTextFile


def main(argv: list[str] | None = None) -> None:
    """Copy the URLs that pass the filter, and print the reasons for the others."""
    args = _parse(argv)
    files = _url_files(args.input)
    output, listed = Path(args.output), [Path(args.rejected)] if args.rejected else []
    lists = [Path(name) for name in (args.domains, args.extensions) if name]
    check_outputs([output, *listed], [*files, *lists], overwrite=args.overwrite)
    url_filter = UrlFilter(_blacklist(args))
    reasons: Counter[str] = Counter()
    kept = 0
    with AtomicTextFile(output) as kept_file, contextlib.ExitStack() as more:
        rejected_files = [more.enter_context(AtomicTextFile(path)) for path in listed]
        for line in _lines(files):
            url = line.decode("utf-8", "replace")
            reason = "malformed" if "\ufffd" in url else url_filter.reason(url)
            if reason is None:
                kept += 1
                kept_file.write(line + b"\n")
                continue
            reasons[reason] += 1
            for file in rejected_files:
                file.write(reason.encode() + b"\t" + line + b"\n")
        total = kept + reasons.total()
        if not total:
            raise DataError(
                "the input holds no URL", found=" ".join(args.input), fix="check --input"
            )
    print(f"kept {kept} of {total} URLs in {output}; refused:")
    print_counts({reason: reasons[reason] for reason in REASONS})


def _lines(files: tuple[Path, ...]) -> Iterator[bytes]:
    for path in files:
        for row in DocumentFile(path, TextRule("lines")):
            yield row.data.strip()


def _url_files(given: list[str]) -> tuple[Path, ...]:
    files = find_inputs(given).files
    for path in files:
        if not is_text(path):
            raise ConfigError(
                "URLs are read from text, one a line", found=str(path), fix="write them as .txt"
            )
    return files


def _blacklist(args: argparse.Namespace) -> Blacklist:
    return Blacklist(
        domains=_entries(args.domains, DOMAINS),
        extensions=_entries(args.extensions, EXTENSIONS),
        min_length=args.min_length,
    )


def _entries(name: str | None, default: Iterable[str]) -> frozenset[str]:
    if name is None:
        return frozenset(default)
    if not Path(name).is_file():
        raise DataError(
            "the list does not exist",
            found=f"{name} (from {Path.cwd()})",
            fix="give the path of a text file, or leave the flag out for the small default",
        )
    return listed_entries(Path(name))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="blacklist_urls.py", description="Leave out the URLs that are not worth fetching."
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=".txt files of one URL a line (.gz, .zst), or folders of them, in sorted order",
    )
    add("--output", required=True, help="text file to write, one URL a line")
    add(
        "--domains",
        metavar="FILE",
        help="domains to refuse, one a line; subdomains are refused too, and a name without a dot "
        "stands for all its domains [about fifty of pictures, films, shops and short notes]",
    )
    add(
        "--extensions",
        metavar="FILE",
        help="extensions of files to refuse, one a line [about sixty that hold no web page]",
    )
    add("--min-length", type=int, default=9, help="characters of the shortest URL to keep [9]")
    add("--rejected", metavar="FILE", help="lists what is refused: reason, tab, URL")
    add("--overwrite", action="store_true", help="replace outputs that exist")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
