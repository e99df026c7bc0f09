"""Tokens that a grammar allows spell texts that match it, for every tokenizer that has bytes."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from megatron.errors import ConfigError
from megatron.inference.constraint import GrammarConstraint, GrammarTable, grammar_table
from megatron.inference.grammar import Grammar, GrammarKind
from megatron.tokenizer.huggingface import LibraryTokenizer
from megatron.tokenizer.token_text import text_rules
from megatron.tokenizer.tokenizer import Tokenizer, build_tokenizer
from tests.support.examples import examples
from tests.unit.tokenizer.vocabularies import write_bert, write_gpt2, write_sentencepiece

PADDED = 7  # rows of a model behind the tokens of its tokenizer
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "kind": {"enum": ["small", "l\u00e4rge"]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
WORDS = Grammar(GrammarKind.REGEX, r"(ab|c){2,5}[0-9]?")


def table_of(tokenizer: Tokenizer) -> GrammarTable:
    found = grammar_table(text_rules(tokenizer), tokenizer.vocab_size + PADDED)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GrammarTable]:
    folder = tmp_path_factory.mktemp("vocabularies")
    (folder / "pieces").mkdir()
    model = str(write_sentencepiece(folder / "pieces", byte_fallback=True, vocab_size=330))
    made = {
        "bytes": build_tokenizer(tokenizer_type="ByteTokenizer"),
        "gpt2": build_tokenizer(
            tokenizer_type="GPT2BPETokenizer", vocab_extra_ids=2, **write_gpt2(folder / "gpt2")
        ),
        "sentencepiece": build_tokenizer(
            tokenizer_type="SentencePieceTokenizer", tokenizer_model=model, vocab_extra_ids=2
        ),
        "llama": build_tokenizer(tokenizer_type="Llama2Tokenizer", tokenizer_model=model),
    }
    return {name: table_of(tokenizer) for name, tokenizer in made.items()} | {
        "hugging face": table_of(of_pieces())
    }


NAMES = ["bytes", "gpt2", "sentencepiece", "llama", "hugging face"]


def of_pieces() -> Tokenizer:
    """A tokenizer.json with pieces of SentencePiece, of single bytes, and special tokens."""
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
    pieces |= {"\u2581": 256, "\u2581a": 257, "b": 258, "<unk>": 259}
    core = tokenizers.Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))  # noqa: S106
    core.decoder = decoders.Sequence(
        [
            *(decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.add_special_tokens(["</s>", "<|im_end|>"])
    return LibraryTokenizer(name="HFTokenizer", vocab_size=262, core=core, eod=260, unk=259)


def drawn(constraint: GrammarConstraint, eod: int, seed: int, most: int = 200) -> list[int]:
    """Return random tokens that are allowed one after the other, up to the end."""
    random_of, output = random.Random(seed), []
    while len(output) < most:
        allowed = constraint.allowed(output)
        assert allowed is not None
        output.append(random_of.choice(np.flatnonzero(allowed).tolist()))
        if output[-1] == eod:
            break
        assert constraint.problem(output) is None
    return output


def constraint_of(table: GrammarTable, grammar: Grammar) -> GrammarConstraint:
    return table.constraint(grammar, frozenset({table.eod}))


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_the_tokens_of_a_text_are_that_text(
    name: str, tables: dict[str, GrammarTable]
) -> None:
    table = tables[name]
    for text in ('{"name": "x"}', " a b", "\u00e4\u65e5 \U0001f600", "\n"):
        assert b"".join(table.texts[token] for token in table.spell(text.encode())) == (
            text.encode()
        )
    assert table.texts[table.eod] == b""
    assert table.texts[-PADDED:] == (b"",) * PADDED


@pytest.mark.parametrize("name", NAMES)
def test_allowed_tokens_spell_texts_that_match_and_end(
    name: str, tables: dict[str, GrammarTable]
) -> None:
    table, ended = tables[name], 0
    for seed in range(12):
        for grammar in (JSON, WORDS):
            output = drawn(constraint_of(table, grammar), table.eod, seed)
            if output[-1] != table.eod:
                continue  # white space of any length
            ended += 1
            text = b"".join(table.texts[token] for token in output).decode()
            if grammar is WORDS:
                assert re.fullmatch(WORDS.text, text)
                continue
            value = json.loads(text)
            assert list(value) == ["name", "ages", "kind"]
            assert len(value["name"]) <= 6
            assert 1 <= len(value["ages"]) <= 3
            assert value["kind"] in ("small", "l\u00e4rge")
    assert ended > 12


def test_what_is_allowed_is_a_function_of_the_output(tables: dict[str, GrammarTable]) -> None:
    table = tables["gpt2"]
    texts = [drawn(constraint_of(table, JSON), table.eod, seed) for seed in range(4)]

    @examples(60)
    @given(st.lists(st.tuples(st.sampled_from(texts), st.integers(0, 40)), max_size=6))
    def check(visits: list[tuple[list[int], int]]) -> None:
        used = constraint_of(table, JSON)
        for text, length in visits:  # back and forth, as proposed tokens and their refusal do
            output = [token for token in text[:length] if token != table.eod]
            for each in (used, used.copy()):
                found = each.allowed(output)
                assert found is not None
                fresh = constraint_of(table, JSON).allowed(output)
                assert np.array_equal(found, fresh)  # type: ignore[arg-type]

    check()


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def test_what_was_taken_back_leaves_nothing(tables: dict[str, GrammarTable]) -> None:
    table = tables["gpt2"]
    # {"name": " mat3u"  and  {"name": "(~..]",  in single bytes, with white space between.
    first = numbers(
        "90 201 1 77 64 76 68 1 198 220 197 220 197 198 197 25 220 198 220 220 197 198 1 296 "
        "18 84 1 220"
    )
    second = numbers(
        "90 1 77 64 76 68 1 220 197 220 25 220 197 201 201 220 198 220 201 220 198 1 7 93 151 "
        "232 129 246 166 115 116 60 1 11 197"
    )
    one = constraint_of(table, JSON)
    assert one.allowed(first) is not None
    found, fresh = one.allowed(second), constraint_of(table, JSON).allowed(second)
    assert found is not None
    assert np.array_equal(found, fresh)  # type: ignore[arg-type]
    assert found[1]  # the quotation mark of the next name, and no second comma
    assert not found[11]


def test_behind_tokens_that_do_not_match_nothing_is_known(tables: dict[str, GrammarTable]) -> None:
    table = tables["bytes"]
    one = constraint_of(table, WORDS)
    assert one.allowed(b"ab") is not None
    assert one.allowed(b"abx") is None
    assert one.allowed(b"abxc") is None
    assert one.problem(b"abx") == "its grammar does not allow the tokens that were drawn"
    assert one.problem(b"ab") is None  # that was undone
    allowed = one.allowed(b"ab")
    assert allowed is not None
    assert np.flatnonzero(allowed).tolist() == list(b"ac")


def ids(allowed: Sequence[bool] | None) -> list[int]:
    assert allowed is not None
    return np.flatnonzero(allowed).tolist()


def test_a_text_may_end_where_it_is_complete_and_has_to_where_nothing_follows(
    tables: dict[str, GrammarTable],
) -> None:
    table = tables["bytes"]
    ends = frozenset({table.eod, ord("c"), 259})  # 259: a row of no text
    one = table.constraint(Grammar(GrammarKind.REGEX, "ab?"), ends)
    assert ids(one.allowed(b"")) == [ord("a")]
    assert ids(one.allowed(b"a")) == [ord("b"), table.eod, 259]
    assert ids(one.allowed(b"ab")) == [table.eod, 259]
    choice = table.constraint(Grammar(GrammarKind.CHOICE, '["yes", "no"]'), ends)
    assert ids(choice.allowed(b"")) == sorted(b"yn")


@pytest.mark.parametrize(
    "text",
    ['start: "a" x\nx: "b" | "(" x ")"\n', 'root ::= "a" x\nx ::= "b" | "(" x ")"\n'],
    ids=["Lark", "GBNF"],
)
def test_brackets_close_in_a_context_free_grammar(
    text: str, tables: dict[str, GrammarTable]
) -> None:
    found = constraint_of(tables["bytes"], Grammar(GrammarKind.LARK, text))
    assert ids(found.allowed([*b"a((b)"])) == [ord(")")]
    assert ids(found.allowed([*b"a((b))"])) == [tables["bytes"].eod]


def test_special_tokens_are_no_text(tables: dict[str, GrammarTable]) -> None:
    for name, table in tables.items():
        anything = constraint_of(table, Grammar(GrammarKind.REGEX, r"(?s:.)*"))
        allowed = ids(anything.allowed([]))
        assert all(table.texts[token] for token in allowed if token != table.eod), name
        assert table.eod in allowed
        assert not {*range(table.vocab_size - PADDED, table.vocab_size)} & {*allowed}


@pytest.mark.parametrize(
    ("grammar", "found"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, '{"not": {"type": "string"}}'), "Unimplemented"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "strin"}'), "Invalid type: strin"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "https://a/b"}'), "does not fetch"),
        (Grammar(GrammarKind.REGEX, "a(?=b)"), "look-around"),
        (Grammar(GrammarKind.REGEX, "(" * 3000), "invalid regex"),
        (Grammar(GrammarKind.LARK, "start: other"), "unknown name"),
        (Grammar(GrammarKind.LARK, "root ::= ("), "Failed to convert the grammar"),
    ],
)
def test_grammars_that_cannot_be_followed_are_refused(
    grammar: Grammar, found: str, tables: dict[str, GrammarTable]
) -> None:
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        constraint_of(tables["bytes"], grammar)
    assert found in caught.value.found
    assert len(caught.value.found) <= 300


def test_a_text_that_could_not_end_is_refused(tables: dict[str, GrammarTable]) -> None:
    with pytest.raises(ConfigError, match="could not end") as caught:
        tables["bytes"].constraint(WORDS, frozenset({ord("x")}))
    assert caught.value.fix == "leave ignore_eos out"


def test_tokenizers_whose_tokens_have_no_bytes_have_no_table(tmp_path: Path) -> None:
    for tokenizer in (
        build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=20),
        build_tokenizer(
            tokenizer_type="BertWordPieceLowerCase", vocab_file=str(write_bert(tmp_path))
        ),
    ):
        assert grammar_table(text_rules(tokenizer), 30) is None
