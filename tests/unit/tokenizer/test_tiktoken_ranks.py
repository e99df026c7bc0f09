"""Megatron-LM's vocabularies of byte sequences by rank: special tokens first, then the ranks."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, DataError, MachineError
from megatron.tokenizer.fingerprint import fingerprint
from megatron.tokenizer.token_text import text_rules
from megatron.tokenizer.tokenizer import Tokenizer, TokenizerSpec

SEQUENCES = [bytes([byte]) for byte in range(256)]
SEQUENCES += [b"he", b"ll", b"hell", b"hello", b"\r\n", b"//", b"bC", b"ab"]
SPECIAL = 10  # of which seven have names


def entry(rank: int, sequence: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(sequence).decode()
    return {"rank": rank, "token_bytes": encoded, "token_str": sequence.decode(errors="replace")}


ENTRIES = [entry(rank, sequence) for rank, sequence in enumerate(SEQUENCES)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps(ENTRIES))
    return path


def load(file: Path, **changes: Any) -> Tokenizer:
    values = {"tiktoken_pattern": "v2", "tiktoken_num_special_tokens": SPECIAL} | changes
    return TokenizerSpec(tokenizer_type="TikTokenizer", tokenizer_model=str(file), **values).build()


def test_ranks_follow_the_special_tokens(file: Path) -> None:
    tokenizer = load(file)
    assert tokenizer.vocab_size == SPECIAL + len(SEQUENCES)
    assert tokenizer.tokenize("hello hell") == [SPECIAL + at for at in (259, ord(" "), 258)]
    names = [tokenizer.piece(token) for token in range(SPECIAL)]
    assert names[:5] == ["<unk>", "<s>", "</s>", "<mask>", "<pad>"]
    assert names[7:] == ["<SPECIAL_7>", "<SPECIAL_8>", "<SPECIAL_9>"]
    assert (tokenizer.unk, tokenizer.bos, tokenizer.eod, tokenizer.pad) == (0, 1, 2, 4)
    assert (tokenizer.mask, tokenizer.cls, tokenizer.sep) == (3, 5, 6)
    assert fingerprint(tokenizer).startswith("274 tokens, end of document 2,")


@pytest.mark.parametrize("text", ["", "hello", "h\u00e9 \U0001f642 </s>\r\n//", "a\n\n\n b  c"])
@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_every_text_comes_back_and_has_no_special_token(
    file: Path, text: str, pattern: str
) -> None:
    tokenizer = load(file, tiktoken_pattern=pattern)
    ids = tokenizer.tokenize(text)
    assert tokenizer.tokenize_batch([text, ""]) == [ids, []]
    assert tokenizer.detokenize(ids) == text
    assert text_rules(tokenizer).text(ids) == text
    assert all(token >= SPECIAL for token in ids)
    assert tokenizer.detokenize([*ids, 2]) == f"{text}</s>"


def test_the_second_pattern_splits_where_the_case_changes(file: Path) -> None:
    first, second = (load(file, tiktoken_pattern=name).tokenize("abC") for name in ("v1", "v2"))
    assert first == [SPECIAL + ord("a"), SPECIAL + 262]  # bC comes before ab
    assert second == [SPECIAL + 263, SPECIAL + ord("C")]
    assert load(file).piece(SPECIAL + 0xE9) == "\\xe9"


def test_only_the_first_ranks_are_used_where_fewer_are_asked_for(file: Path) -> None:
    tokenizer = load(file, vocab_size=SPECIAL + 257)
    assert tokenizer.vocab_size == SPECIAL + 257
    assert tokenizer.tokenize("hell") == [SPECIAL + at for at in (256, ord("l"), ord("l"))]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiktoken_pattern": None}, "needs --tiktoken-pattern"),
        ({"tiktoken_pattern": "v3"}, "a pattern of another name"),
        ({"tiktoken_num_special_tokens": 6}, "more special tokens with names"),
        ({"vocab_size": SPECIAL + 255}, "no such number of tokens"),
        ({"vocab_size": SPECIAL + 265}, "no such number of tokens"),
        ({"merge_file": "m"}, "does not read --merge-file"),
        ({"vocab_extra_ids": 2}, "cannot add this number of extra ids"),
    ],
)
def test_flags_that_do_not_work_are_refused(
    file: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(file, **changes)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "Expecting"),
        ("{}", "it is not a list"),
        (json.dumps(ENTRIES[1:]), "entry 0 is not rank"),
        (json.dumps([{**ENTRIES[0], "more": 1}]), "entry 0 is not rank"),
        (json.dumps([{**ENTRIES[0], "token_bytes": "!"}]), "token_bytes of entry 0"),
        (json.dumps(ENTRIES[:255]), "first 256 entries are not the bytes"),
        (json.dumps([*ENTRIES, entry(len(ENTRIES), b"he")]), "stands in it twice"),
    ],
)
def test_a_damaged_file_is_refused(file: Path, content: str, why: str) -> None:
    file.write_text(content)
    with pytest.raises(DataError, match="vocabulary of TikTokenizer cannot be read") as caught:
        load(file)
    assert why in str(caught.value.found)


def test_a_package_that_is_missing_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(MachineError, match="needs a package that is not installed") as caught:
        load(file)
    assert caught.value.fix == "pip install tiktoken"
