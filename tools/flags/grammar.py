"""The flags of programs that say what generated texts have to match."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.errors import ConfigError
from megatron.inference.grammar import Grammar, GrammarKind, check_json_schema
from megatron.json_values import parse_json
from megatron.serving.packages import check_packages
from megatron.tokenizer.protocol import Tokenizer
from megatron.tokenizer.token_text import text_rules

if TYPE_CHECKING:
    from megatron.inference.constraint import GrammarConstraint


def add_grammar_flags(parser: argparse.ArgumentParser) -> None:
    """Add --json-schema and the others, of which one may be given."""
    add = (
        parser.add_argument_group(
            "grammar", "What each text has to match (docs/inference.md#constrained-decoding)."
        )
        .add_mutually_exclusive_group()
        .add_argument
    )
    add("--json-schema", type=Path, metavar="FILE", help="a JSON schema")
    add("--regex", metavar="PATTERN", help="a regular expression")
    add("--choice", action="append", metavar="TEXT", help="one of these texts; repeatable")
    add("--grammar", type=Path, metavar="FILE", help="a grammar of Lark, or GBNF of llama.cpp")


def grammar_of(args: argparse.Namespace) -> Grammar | None:
    """Return what texts have to match; None: anything.

    Raises:
        ConfigError: a file cannot be read, or is no JSON schema; or the package is missing that
            follows grammars.
    """
    grammar = _grammar(args)
    if grammar is not None:
        check_packages(["llguidance"])
    return grammar


def _grammar(args: argparse.Namespace) -> Grammar | None:
    if args.json_schema is not None:
        text = _read(args.json_schema, "--json-schema")
        try:
            check_json_schema(parse_json(text))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                "the JSON schema is no JSON",
                found=f"--json-schema {args.json_schema}: {error}",
                fix='write a schema such as {"type": "object"}',
            ) from error
        return Grammar(GrammarKind.JSON_SCHEMA, text)
    if args.regex is not None:
        return Grammar(GrammarKind.REGEX, args.regex)
    if args.choice is not None:
        return Grammar(GrammarKind.CHOICE, json.dumps(args.choice))
    if args.grammar is not None:
        return Grammar(GrammarKind.LARK, _read(args.grammar, "--grammar"))
    return None


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the file of a grammar cannot be read",
            found=f"{flag} {path}: {error}",
            fix="give the path of a text file",
        ) from error


def grammar_constraint(
    grammar: Grammar | None, tokenizer: Tokenizer, vocab_size: int
) -> "GrammarConstraint | None":
    """Return what a grammar allows with a tokenizer, before the first token.

    Raises:
        ConfigError: the grammar cannot be used, or the tokens have no texts.
    """
    if grammar is None:
        return None
    from megatron.inference.constraint import grammar_table  # with a package of an extra

    table = grammar_table(text_rules(tokenizer), vocab_size)
    if table is None:
        raise ConfigError(
            "texts of this tokenizer cannot follow a grammar",
            found="its tokens have no texts of their own, or none ends a document",
            fix="leave --json-schema, --regex, --choice and --grammar out",
        )
    return table.constraint(grammar, frozenset({table.eod}))
