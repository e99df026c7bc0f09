"""Cuts text of evaluation tasks out of training documents, by n-grams of words.

Brown et al. 2020 (GPT-3), appendix C: an n-gram of a task and 200 characters on both sides go,
pieces shorter than 200 characters go, and so does a document in more than ten pieces. Case and
punctuation do not count. Unlike there, n-grams that are common in the training text count as well.
"""

import argparse
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.errors import ConfigError, DataError
from megatron.program import run_program
from tools.openwebtext.json_lines import (
    add_file_flags,
    check_outputs,
    json_line,
    json_line_files,
    line_of,
    require_rows,
)
from tools.preprocessing.documents import (
    DocumentFile,
    TextRule,
    fields_of,
    find_inputs,
    record_of,
    texts,
)
from tools.preprocessing.text_output import AtomicTextFile

_WORD = re.compile(r"\w+")


class NgramRule(NamedTuple):
    """The size of the cut around a match, and the shortest piece to keep."""

    ngram: int = 13  # words
    shortest_ngram: int = 8  # words of a task that is shorter than `ngram`, taken whole
    margin: int = 200  # characters on both sides
    shortest_piece: int = 200  # characters
    most_pieces: int = 10


class TaskNgrams:
    """The n-grams of tasks, by their length in words."""

    def __init__(self, tasks: Iterable[str], rule: NgramRule) -> None:
        self._by_length: dict[int, set[tuple[str, ...]]] = {}
        for text in tasks:
            words = _WORD.findall(text.lower())
            size = min(rule.ngram, len(words))
            if size < min(rule.shortest_ngram, rule.ngram):
                continue
            grams = self._by_length.setdefault(size, set())
            grams.update(tuple(words[at : at + size]) for at in range(len(words) - size + 1))

    def __len__(self) -> int:
        return sum(map(len, self._by_length.values()))

    def matches(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and end characters of each n-gram of a task."""
        found = list(_WORD.finditer(text))
        words = [match.group().lower() for match in found]
        for size, grams in self._by_length.items():
            for at in range(len(words) - size + 1):
                if tuple(words[at : at + size]) in grams:
                    yield found[at].start(), found[at + size - 1].end()


def clean_pieces(text: str, ngrams: TaskNgrams, rule: NgramRule) -> list[str]:
    """Return the rest of a document: all of it, some pieces, or nothing."""
    matches = sorted(ngrams.matches(text))
    if not matches:
        return [text]
    pieces = []
    begin = 0
    for start, stop in matches:
        pieces.append(text[begin : max(begin, start - rule.margin)])
        begin = max(begin, stop + rule.margin)
    pieces.append(text[begin:])
    pieces = [piece for piece in pieces if len(piece) >= rule.shortest_piece]
    return pieces if len(pieces) <= rule.most_pieces else []


def main(argv: list[str] | None = None) -> None:
    """Copy the documents without the text of the tasks, and print what was removed."""
    args = _parse(argv)
    output = Path(args.output)
    files = json_line_files(args.input)
    task_files = find_inputs(args.tasks).files
    check_outputs([output], [*files, *task_files], overwrite=args.overwrite)
    rule = NgramRule(ngram=args.ngram)
    tasks = texts(task_files, args.task_key, TextRule("lines"))
    ngrams = TaskNgrams((text for _, text in tasks), rule)
    if not len(ngrams):
        raise DataError(
            "the tasks hold no text that is long enough to be looked for",
            found=f"{' '.join(args.tasks)}, all below {min(rule.ngram, rule.shortest_ngram)} words",
            fix="check --tasks and --task-key",
        )
    documents = cut = dropped = 0
    with AtomicTextFile(output) as file:
        for path in files:
            for row in DocumentFile(path, columns=[args.json_key]):
                text = fields_of(path, row, [args.json_key])[0]
                pieces = clean_pieces(text, ngrams, rule)
                documents += 1
                if pieces == [text]:
                    file.write(line_of(row))
                    continue
                cut, dropped = cut + bool(pieces), dropped + (not pieces)
                record = record_of(path, row)
                for piece in pieces:
                    file.write(json_line(record | {args.json_key: piece}))
        require_rows(documents, args.input)
    print(f"{len(ngrams)} n-grams of tasks; {documents} documents in {output}:")
    print(f"{cut} were cut, {dropped} dropped, {documents - cut - dropped} left as they are")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="decontaminate.py", description="Cut text of evaluation tasks out of documents."
    )
    add_file_flags(parser)
    add = parser.add_argument
    add("--tasks", nargs="+", required=True, metavar="PATH", help=".jsonl, or .txt by lines")
    add("--task-key", default="text", help="key of the text in the tasks [text]")
    add("--ngram", type=int, default=13, help="words in a row that make a match [13]")
    args = parser.parse_args(argv)
    if args.ngram < 1:
        raise ConfigError(
            "a match has at least one word", found=f"--ngram {args.ngram}", fix="use --ngram 13"
        )
    return args


if __name__ == "__main__":
    run_program(main)
