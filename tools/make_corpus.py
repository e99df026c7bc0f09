"""A corpus for the first run, without a download: the sources of Python's standard library.

Each module gives its prose (docstrings) and its code (without them) as documents of a few KB, in
an order shuffled by a fixed seed, so that a split by position is a fair split. The same Python
gives the same file. With DATA it makes nothing and names the user's own files instead. Standard
output holds only paths for --input of the next tool.
"""

import argparse
import ast
import importlib.util
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from megatron.errors import ConfigError, DataError
from megatron.program import run_program
from tools.preprocessing.documents import find_inputs
from tools.preprocessing.text_output import refuse_existing_texts, write_text_files

# Tests repeat themselves, encodings are tables, and what is installed differs between machines.
_PASSED_OVER = frozenset(
    {"test", "tests", "idlelib", "turtledemo", "lib2to3", "encodings", "ensurepip", "__pycache__"}
    | {"site-packages", "dist-packages"}
)
_SEED = 1234
_TARGET_BYTES = 4000  # of one document of code; a longer definition stays whole
_SHORTEST_BYTES = 200


class Document(NamedTuple):
    """One line of the corpus."""

    source: str  # module path, relative to the library
    kind: str  # prose or code
    text: str


def main(argv: list[str] | None = None) -> None:
    """Write the corpus, or list the user's files; prints paths to standard output."""
    args = _parse(argv)
    if args.data:
        for path in find_inputs([args.data]).files:
            print(path)
        return
    if args.max_mb <= 0:
        raise ConfigError(
            "a corpus has a positive size",
            found=f"--max-mb {args.max_mb}",
            fix="use --max-mb 8, or leave it out",
        )
    output = Path(args.output)
    refuse_existing_texts([output], overwrite=args.overwrite)
    documents = list(library_documents(Path(sysconfig.get_paths()["stdlib"])))
    chosen = choose(documents, limit_bytes=int(args.max_mb * 1e6), seed=args.seed)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text_files({output: "".join(json.dumps(row._asdict()) + "\n" for row in chosen)})
    size = sum(len(row.text.encode()) for row in chosen)
    print(f"{len(chosen)} documents, {size / 1e6:.1f} MB of text", file=sys.stderr)
    print(output)


def library_documents(folder: Path) -> Iterator[Document]:
    """Yield the documents of every module of the library, sorted by path."""
    paths = sorted(
        (path for path in folder.rglob("*.py") if _is_wanted(path.relative_to(folder))),
        key=lambda path: path.relative_to(folder).as_posix(),
    )
    if not paths:
        raise DataError(
            "this Python has no sources of its standard library",
            found=f"no modules in {folder}",
            fix="give a corpus of your own: make_corpus.py DATA",
        )
    for path in tqdm(paths, unit=" modules", disable=not sys.stderr.isatty()):
        name = path.relative_to(folder).as_posix()
        source = path.read_bytes().decode("utf-8", errors="replace")
        yield from module_documents(name, source)


def module_documents(name: str, source: str) -> Iterator[Document]:
    """Yield the prose and the code of one module, without overlap."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # the library ships broken modules on purpose, for its own tests
    docstrings = list(_docstrings(tree))
    prose = "\n\n".join(text for _, text in docstrings)
    if name == "pydoc_data/topics.py":
        prose = ""
        for text in _topics(tree):
            yield Document(name, "prose", text)
    if len(prose) >= _SHORTEST_BYTES:
        yield Document(name, "prose", prose)
    lines = source.splitlines()
    for node, _ in docstrings:
        for number in range(node.lineno - 1, node.end_lineno or node.lineno):
            lines[number] = ""
    if name != "pydoc_data/topics.py":
        yield from (Document(name, "code", text) for text in _pieces(tree, lines))


def choose(documents: list[Document], *, limit_bytes: int, seed: int) -> list[Document]:
    """Return the first documents of a shuffled order with at most `limit_bytes` of text."""
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)  # not cryptography
    chosen: list[Document] = []
    size = 0
    for document in shuffled:
        size += len(document.text.encode())
        if size > limit_bytes and chosen:
            break
        chosen.append(document)
    return chosen


def _is_wanted(path: Path) -> bool:
    parts = path.parts
    is_made_for_machine = any(part.startswith(("config-", "_sysconfigdata")) for part in parts)
    return not is_made_for_machine and not _PASSED_OVER.intersection(parts)


def _docstrings(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and isinstance(first := node.body[0], ast.Expr):
                name = "" if isinstance(node, ast.Module) else f"{node.name}: "
                yield first.value, name + text


def _topics(tree: ast.Module) -> Iterator[str]:
    """Yield the texts behind Python's help(): a dict of strings, one long text per topic."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for value in node.values:
                text = ast.literal_eval(value)
                if isinstance(text, str) and len(text) >= _SHORTEST_BYTES:
                    yield text.strip()


def _pieces(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    """Yield consecutive top-level statements, joined up to about `_TARGET_BYTES`."""
    starts = [_first_line(node) for node in tree.body]
    start = 0
    for index, end in enumerate([*starts[1:], len(lines)]):
        text = _tidied(lines[start:end])
        if len(text) >= _TARGET_BYTES or index == len(starts) - 1:
            if len(text) >= _SHORTEST_BYTES:
                yield text
            start = end


def _first_line(node: ast.stmt) -> int:
    """Return the index of a statement's first line, decorators included."""
    decorators = getattr(node, "decorator_list", [])
    first: int = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return first - 1


def _tidied(lines: list[str]) -> str:
    """Return the lines joined, with at most two consecutive blank lines."""
    text = "\n".join(line.rstrip() for line in lines).strip("\n")
    while "\n\n\n\n" in text:
        text = text.replace("\n\n\n\n", "\n\n\n")
    return text


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make_corpus.py",
        description="Make a small corpus from Python's own sources, or list the files of yours.",
    )
    add = parser.add_argument
    add(
        "data",
        nargs="?",
        metavar="DATA",
        help="a .txt, .jsonl, ... file or a folder of your own; its files are listed",
    )
    add("--output", default="corpus.jsonl", help="the file to write [corpus.jsonl]")
    add("--max-mb", type=float, default=8.0, help="most megabytes of text [8]")
    add("--seed", type=int, default=_SEED, help=f"order of the documents [{_SEED}]")
    add("--overwrite", action="store_true", help="replace the output if it exists")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
