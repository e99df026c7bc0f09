"""Flags say what texts have to match; what cannot be followed is refused before a model is read."""

import argparse
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.inference.grammar import Grammar, GrammarKind
from megatron.serving import packages
from megatron.tokenizer.tokenizer import build_tokenizer
from tools.flags.grammar import add_grammar_flags, grammar_constraint, grammar_of

SCHEMA = '{"type": "object"}'


def given(*words: str) -> Grammar | None:
    parser = argparse.ArgumentParser()
    add_grammar_flags(parser)
    return grammar_of(parser.parse_args(words))


def test_each_flag_is_a_grammar(tmp_path: Path) -> None:
    (tmp_path / "schema").write_text(SCHEMA)
    assert given() is None
    assert given("--json-schema", str(tmp_path / "schema")) == Grammar(
        GrammarKind.JSON_SCHEMA, SCHEMA
    )
    assert given("--regex", "a+") == Grammar(GrammarKind.REGEX, "a+")
    assert given("--choice", "a", "--choice", "b") == Grammar(GrammarKind.CHOICE, '["a", "b"]')
    assert given("--grammar", str(tmp_path / "schema")) == Grammar(GrammarKind.LARK, SCHEMA)


def test_one_flag_at_a_time() -> None:
    with pytest.raises(SystemExit):
        given("--regex", "a", "--choice", "b")


def test_files_that_are_no_schemas_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the file of a grammar cannot be read"):
        given("--json-schema", str(tmp_path / "none"))
    for text, message in (("{", "the JSON schema is no JSON"), ('{"typ": 1}', "unknown keyword")):
        (tmp_path / "schema").write_text(text)
        with pytest.raises(ConfigError, match=message):
            given("--json-schema", str(tmp_path / "schema"))


def test_the_package_that_follows_grammars_is_missed_before_a_model_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packages, "_version", lambda name: None)
    with pytest.raises(ConfigError, match="packages are needed") as caught:
        given("--regex", "a")
    assert caught.value.found == "no llguidance"


def test_tokens_without_texts_follow_no_grammar() -> None:
    grammar = Grammar(GrammarKind.REGEX, "a+")
    numbers = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=20)
    with pytest.raises(ConfigError, match="cannot follow a grammar"):
        grammar_constraint(grammar, numbers, 20)
    letters = build_tokenizer(tokenizer_type="ByteTokenizer")
    found = grammar_constraint(grammar, letters, letters.vocab_size)
    assert found is not None
    assert found.problem([*b"aa"]) is None
    assert grammar_constraint(None, numbers, 20) is None
