"""Web documents through repair, length and language: what is kept, and what is refused for what.

The steps are those of `tools.openwebtext.cleaning`. Documents are cleaned in many processes and
written in the order of the input, so the output does not depend on --workers.
"""

import argparse
import contextlib
import functools
import importlib.util
import sys
from collections import Counter
from pathlib import Path

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm

from megatron import log
from megatron.errors import ConfigError
from megatron.program import run_program
from tools.flags.tokenizer import add_tokenizer_flags, tokenizer_spec
from tools.openwebtext.cleaning import LENGTH_UNITS, REASONS, CleaningSteps, clean_chunk
from tools.openwebtext.json_lines import (
    add_file_flags,
    check_outputs,
    json_line_files,
    print_counts,
    require_rows,
)
from tools.preprocessing.documents import TextRule
from tools.preprocessing.encoding import BAD_LINES_SHOWN, encode_in_order, read_chunks
from tools.preprocessing.text_output import AtomicTextFile


def main(argv: list[str] | None = None) -> None:
    """Copy the documents that pass every step, and count the others by reason."""
    args = _parse(argv)
    steps = _steps(args)
    files = json_line_files(args.input)
    output, listed = Path(args.output), [Path(args.rejected)] if args.rejected else []
    check_outputs([output, *listed], files, overwrite=args.overwrite)
    steps.prepare()
    chunks = read_chunks(files, TextRule("lines"), columns=[args.json_key])
    clean = functools.partial(clean_chunk, steps)
    reasons: Counter[str] = Counter()
    bad_examples: list[str] = []
    kept = changed = 0
    with (
        tqdm(
            total=sum(path.stat().st_size for path in files),
            unit="B",
            unit_scale=True,
            disable=not sys.stderr.isatty(),
        ) as bar,
        AtomicTextFile(output) as kept_file,
        contextlib.ExitStack() as more,
        contextlib.closing(encode_in_order(chunks, clean, workers=args.workers)) as cleaned,  # type: ignore[type-var]
    ):
        rejected_files = [more.enter_context(AtomicTextFile(path)) for path in listed]
        for chunk in cleaned:
            kept_file.write(b"".join(chunk.kept))
            for file in rejected_files:
                file.write(b"".join(chunk.rejected))
            reasons.update(chunk.reasons)
            kept, changed = kept + len(chunk.kept), changed + chunk.changed
            bad_examples += chunk.bad_examples[: BAD_LINES_SHOWN - len(bad_examples)]
            bar.update(chunk.disk_bytes)
        total = kept + reasons.total()
        require_rows(total, args.input)
    print(f"kept {kept} of {total} documents in {output}, {changed} of them with changed text")
    print("refused:")
    print_counts({reason: reasons[reason] for reason in REASONS})
    if bad_examples:
        listed_lines = "".join(f"\n  {example}" for example in bad_examples)
        log.warning(f"skipped {reasons['bad line']} bad lines, the first:{listed_lines}")


def _steps(args: argparse.Namespace) -> CleaningSteps:
    return CleaningSteps(
        key=args.json_key,
        repair_unicode=not args.no_unicode_repair,
        tidy_white_space=args.tidy_white_space,
        javascript_below=args.javascript_below,
        min_length=args.min_length,
        length_unit=args.length_unit,
        tokenizer=tokenizer_spec(args) if args.length_unit == "tokens" else None,
        languages=() if "any" in args.language else tuple(args.language),
        language_below=args.language_below,
        skip_bad_lines=args.on_bad_line == "skip",
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cleanup_dataset.py", description="Repair web documents, and refuse the useless ones."
    )
    add_file_flags(parser)
    _add_run_flags(parser)
    _add_step_flags(parser.add_argument_group("steps, in this order"))
    add_tokenizer_flags(parser.add_argument_group("--length-unit tokens"), required=False)
    args = parser.parse_args(argv)
    _check(args)
    return args


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rejected", metavar="FILE", help="keeps what is refused, with reason and place (.jsonl)")
    add(
        "--on-bad-line",
        choices=("error", "skip"),
        default="error",
        help="a line that is no JSON, no UTF-8 or has no text: stop, or refuse it [error]",
    )
    add("--workers", type=int, default=1, help="processes that clean; 1: no other process [1]")


def _add_step_flags(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--no-unicode-repair", action="store_true", help="do not repair mangled text by ftfy")
    add(
        "--tidy-white-space",
        action="store_true",
        help="make runs of spaces one space, and runs of blank lines one blank line",
    )
    add(
        "--javascript-below",
        type=int,
        default=0,
        metavar="CHARACTERS",
        help="refuse shorter documents that mention JavaScript, as error pages do; Megatron: "
        "256 [0: none]",
    )
    add(
        "--min-length",
        type=int,
        default=128,
        metavar="N",
        help="refuse shorter documents; 0: only empty ones [128]",
    )
    add(
        "--length-unit",
        choices=LENGTH_UNITS,
        default="words",
        help="what --min-length counts: words between white space (useless for Chinese, Japanese "
        "or Thai), characters, or tokens of --tokenizer-type [words]",
    )
    add(
        "--language",
        nargs="+",
        default=["en"],
        metavar="CODE",
        help="languages to keep, by ISO 639 code; any: all of them [en]",
    )
    add(
        "--language-below",
        type=int,
        metavar="CHARACTERS",
        help="detect the language of shorter documents only [of all]",
    )


def _check(args: argparse.Namespace) -> None:
    lowest = {"workers": 1, "javascript_below": 0, "min_length": 0, "language_below": 1}
    for name, least in lowest.items():
        value = getattr(args, name)
        if value is not None and value < least:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} is at least {least}",
                found=f"{flag} {value}",
                fix=f"use {least} or more, or leave it out",
            )
    if (args.length_unit == "tokens") != (args.tokenizer_type is not None):
        raise ConfigError(
            "a tokenizer is named for counting tokens, and for nothing else",
            found=f"--length-unit {args.length_unit}"
            + (f" with --tokenizer-type {args.tokenizer_type}" if args.tokenizer_type else ""),
            fix="add --tokenizer-type ByteTokenizer (or another), or use --length-unit words"
            if args.length_unit == "tokens"
            else "add --length-unit tokens, or leave --tokenizer-type out",
        )
    if "any" in args.language and len(args.language) > 1:
        raise ConfigError(
            "any language and some languages cannot both be meant",
            found=f"--language {' '.join(args.language)}",
            fix="use --language any, or name languages only",
        )


if __name__ == "__main__":
    run_program(main)
