"""Faster encoders: the same ids as the tokenizer's, or they are not used."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gigatoken
import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.tokenizer.tokenizer import Tokenizer, TokenizerSpec, build_tokenizer
from tests.support.examples import examples
from tests.unit.tokenizer.vocabularies import write_gpt2
from tools import preprocess_data
from tools.preprocessing import encoding
from tools.preprocessing.encoders import build_encoder, choose_encoder, is_settled

FAST = ("tiktoken", "gigatoken")
TEXTS = [
    "the quick brown fox",
    "",
    "it's  3,000 na\u00efve \u65e5\u672c\u8a9e caf\u00e9s\n\n\tdone <|endoftext|>",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \ud55c\uad6d\uc5b4 \U0001f468\u200d\U0001f469 \u2167",
    "a letter of 2025: \u088f, and an older one: \ua7c1",
]


class Changed:
    """gigatoken.Tokenizer whose results something is done to, as another version of it might."""

    def __init__(self, core: gigatoken.Tokenizer) -> None:
        self._core = core

    @classmethod
    def from_json(cls, text: str) -> "Changed":
        return cls(gigatoken.Tokenizer.from_json(text))

    def encode_batch(self, texts: list[str]) -> SimpleNamespace:
        rows = self.change([self._core.encode_batch([text])[0].tolist() for text in texts])
        ids = np.array([token for row in rows for token in row], np.uint32)
        offsets = np.cumsum([0, *map(len, rows)])
        return SimpleNamespace(
            layout=SimpleNamespace(
                offsets=SimpleNamespace(data=offsets), content=SimpleNamespace(data=ids)
            )
        )

    def change(self, rows: list[list[int]]) -> list[list[int]]:
        return rows


def install(
    monkeypatch: pytest.MonkeyPatch, *installed: str, changed: type[Changed] | None = None
) -> None:
    """Make exactly the encoders of these names importable; gigatoken `changed` if given."""
    packages: dict[str, Any] = {"tiktoken": tiktoken, "gigatoken": gigatoken}
    if changed is not None:
        packages["gigatoken"] = SimpleNamespace(Tokenizer=changed)
    for name in FAST:
        monkeypatch.setitem(sys.modules, name, packages[name] if name in installed else None)


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_gpt2(tmp_path_factory.mktemp("gpt2"), 400)


@pytest.fixture(scope="module")
def gpt2(gpt2_files: dict[str, str]) -> Tokenizer:
    return build_tokenizer(tokenizer_type="GPT2BPETokenizer", **gpt2_files)


def ids(encoded: Any) -> list[list[int]]:
    return [row.tolist() for row in np.split(encoded.tokens, np.cumsum(encoded.sizes)[:-1])]


@pytest.mark.parametrize("name", FAST)
def test_every_encoder_gives_the_tokenizers_ids(
    name: str, gpt2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gpt2.tokenize_batch(TEXTS)
    assert ids(build_encoder("tokenizers", gpt2)(TEXTS)) == expected
    install(monkeypatch, name)
    encode = build_encoder(name, gpt2)
    assert ids(encode(TEXTS)) == expected
    assert [len(part) for part in encode([])] == [0, 0]
    assert choose_encoder(name, gpt2, TEXTS) == name


@given(texts=st.lists(st.text(max_size=40), min_size=1, max_size=4))
@examples(100)
def test_any_text_has_the_tokenizers_ids(gpt2: Tokenizer, texts: list[str]) -> None:
    expected = gpt2.tokenize_batch(texts)
    for name in FAST:
        assert ids(build_encoder(name, gpt2)(texts)) == expected


def test_ids_need_not_be_in_the_order_of_the_merges(tmp_path: Path) -> None:
    files = write_gpt2(tmp_path)
    path = Path(files["vocab_file"])
    vocab = json.loads(path.read_text())
    path.write_text(json.dumps({piece: len(vocab) - 1 - i for piece, i in vocab.items()}))
    tokenizer = build_tokenizer(tokenizer_type="GPT2BPETokenizer", **files)
    encode = build_encoder("tiktoken", tokenizer)
    assert ids(encode(TEXTS)) == tokenizer.tokenize_batch(TEXTS)


@pytest.mark.parametrize(
    ("text", "settled"),
    [
        ("plain", True),
        ("caf\u00e9 \u201cquoted\u201d \u65e5\u672c \U0001f600", True),
        ("\u0e44\u0e17\u0e22", True),  # Thai is as old as Unicode
        ("\u0870", False),  # a letter since edition 14
        ("\U00033000", False),  # a letter since edition 17
        ("\U0001e900", False),  # Adlam, of edition 9
    ],
)
def test_only_characters_that_every_edition_of_unicode_classes_alike_are_settled(
    text: str, settled: bool
) -> None:
    assert is_settled(text) is settled


class Newer(Changed):
    """Another edition of Unicode: wrong about texts with a certain letter alone."""

    def encode_batch(self, texts: list[str]) -> SimpleNamespace:
        assert not any("\u088f" in text for text in texts)
        return super().encode_batch(texts)


def test_texts_on_which_libraries_may_differ_go_to_the_exact_encoder(
    gpt2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "gigatoken", changed=Newer)
    encode = build_encoder("gigatoken", gpt2)
    assert ids(encode(TEXTS)) == gpt2.tokenize_batch(TEXTS)


class OffByOne(Changed):
    def change(self, rows: list[list[int]]) -> list[list[int]]:
        return [[*row[:-1], row[-1] + 1] if len(row) == 2 else row for row in rows]


class OneShort(Changed):
    def change(self, rows: list[list[int]]) -> list[list[int]]:
        return rows[1:]


class Failing(Changed):
    def change(self, rows: list[list[int]]) -> list[list[int]]:
        raise RuntimeError("out of luck")


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (OffByOne, "other ids than the tokenizer for 'zz'"),
        (OneShort, "results for"),
        (Failing, "it failed: RuntimeError: out of luck"),
    ],
)
def test_auto_passes_over_an_encoder_that_differs_and_by_name_it_is_an_error(
    kind: type[Changed],
    problem: str,
    gpt2: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(monkeypatch, *FAST, changed=kind)
    assert choose_encoder("auto", gpt2, ["zz"]) == "tiktoken"
    message = capsys.readouterr().err
    assert "--encoder auto passes over gigatoken" in message
    assert problem in message
    with pytest.raises(ConfigError, match="gigatoken cannot be used") as caught:
        choose_encoder("gigatoken", gpt2, ["zz"])
    assert problem in str(caught.value)


def test_auto_is_the_fastest_that_is_installed(
    gpt2: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for installed, chosen in (((), "tokenizers"), (("tiktoken",), "tiktoken"), (FAST, "gigatoken")):
        install(monkeypatch, *installed)
        assert choose_encoder("auto", gpt2, TEXTS) == chosen
        assert choose_encoder("tokenizers", gpt2, TEXTS) == "tokenizers"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", FAST)
def test_an_encoder_that_is_missing_is_named_with_the_way_to_get_it(
    name: str, gpt2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    with pytest.raises(ConfigError, match=f"the package {name} is not installed") as caught:
        choose_encoder(name, gpt2, [])
    assert f"pip install {name}" in str(caught.value)


def test_other_tokenizers_have_no_faster_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *FAST)
    tokenizer = build_tokenizer(tokenizer_type="ByteTokenizer")
    assert choose_encoder("auto", tokenizer, TEXTS) == "tokenizers"
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        choose_encoder("tiktoken", tokenizer, TEXTS)
    assert "ByteTokenizer is not GPT2BPETokenizer" in str(caught.value)


def bpe(folder: Path, merges: Sequence[str], *, without: str = "", extra: int = 0) -> Tokenizer:
    """A GPT-2 vocabulary of these merges, without the piece `without`."""
    files = write_gpt2(folder)
    path = Path(files["vocab_file"])
    vocab = json.loads(path.read_text())
    pieces = [piece for piece in list(vocab)[:256] if piece != without]
    pieces += [merge.replace(" ", "") for merge in merges]
    path.write_text(json.dumps({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}))
    Path(files["merge_file"]).write_text("#version: 0.2\n" + "".join(f"{m}\n" for m in merges))
    spec = TokenizerSpec(tokenizer_type="GPT2BPETokenizer", vocab_extra_ids=extra, **files)
    return spec.build()


@pytest.mark.parametrize(
    ("merges", "options", "why"),
    [
        (["b c", "a b", "ab c"], {}, "do not make the piece 'abc'"),
        (["a b", "b c", "ab c", "a bc"], {}, "two merges make the same piece"),
        (["a b"], {"without": "z"}, "no piece for byte 0x7a"),
        (["a b"], {"extra": 2}, "--vocab-extra-ids makes names in the text into ids"),
    ],
)
def test_a_vocabulary_that_an_encoder_cannot_follow_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    merges: list[str],
    options: dict[str, Any],
    why: str,
) -> None:
    install(monkeypatch, "tiktoken")
    tokenizer = bpe(tmp_path, merges, **options)
    with pytest.raises(ConfigError, match="tiktoken cannot be used") as caught:
        build_encoder("tiktoken", tokenizer)
    assert why in str(caught.value)


def test_the_corpus_is_the_same_by_every_encoder(
    tmp_path: Path,
    gpt2_files: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(monkeypatch, *FAST)
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 3))
    written = set()
    for name in ("tokenizers", *FAST):
        flags = ["--input", str(source), "--output-prefix", str(tmp_path / name), "--append-eod"]
        flags += ["--vocab-file", gpt2_files["vocab_file"], "--encoder", name]
        flags += ["--merge-file", gpt2_files["merge_file"], "--split-sentences"]
        preprocess_data.main([*flags, "--tokenizer-type", "GPT2BPETokenizer"])
        assert f"encoder {name}" in capsys.readouterr().out
        files = [tmp_path / f"{name}_text_sentence{suffix}" for suffix in (".bin", ".idx")]
        written.add(tuple(path.read_bytes() for path in files))
    assert len(written) == 1


def test_a_run_builds_its_tokenizer_and_its_encoder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "tiktoken")
    built: list[str] = []
    build_tokenizer_of = TokenizerSpec.build

    def counted_tokenizer(spec: TokenizerSpec) -> Tokenizer:
        built.append(spec.tokenizer_type)
        return build_tokenizer_of(spec)

    def counted_encoder(name: str, tokenizer: Tokenizer) -> Any:
        built.append(name)
        return build_encoder(name, tokenizer)

    monkeypatch.setattr(TokenizerSpec, "build", counted_tokenizer)
    monkeypatch.setattr(encoding, "build_encoder", counted_encoder)
    files = write_gpt2(tmp_path / "tokenizer")
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": "the quick brown fox"}) + "\n")
    flags = ["--input", str(source), "--output-prefix", str(tmp_path / "x")]
    flags += ["--tokenizer-type", "GPT2BPETokenizer", "--encoder", "auto"]
    flags += ["--vocab-file", files["vocab_file"], "--merge-file", files["merge_file"]]
    preprocess_data.main(flags)
    assert built == ["GPT2BPETokenizer", "tiktoken"]
