"""The text of tokens that come one by one is that of all tokens at once."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from megatron.tokenizer.huggingface import LibraryTokenizer
from megatron.tokenizer.token_text import text_rules
from megatron.tokenizer.tokenizer import Tokenizer, build_tokenizer
from tests.support.examples import examples
from tests.unit.tokenizer.vocabularies import write_bert, write_gpt2, write_sentencepiece

REPLACED = "\ufffd"
LLAMA_DECODER = decoders.Sequence(
    [
        *(decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()),
        decoders.Strip(" ", 1, 0),
    ]
)


def of_pieces(decoder: object) -> Tokenizer:
    """A tokenizer.json with pieces of SentencePiece, of single bytes, and two added tokens."""
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
    pieces |= {"\u2581": 256, "\u2581a": 257, "b": 258, "<unk>": 259}
    core = tokenizers.Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))  # noqa: S106
    core.decoder = decoder
    core.add_special_tokens(["<s>", "<x>"])
    return LibraryTokenizer(name="HFTokenizer", vocab_size=262, core=core)


@pytest.fixture(scope="module")
def every_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    folder = tmp_path_factory.mktemp("vocabularies")
    made = [
        build_tokenizer(tokenizer_type="ByteTokenizer"),
        build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=20),
        build_tokenizer(
            tokenizer_type="GPT2BPETokenizer", vocab_extra_ids=2, **write_gpt2(folder / "gpt2")
        ),
        build_tokenizer(
            tokenizer_type="BertWordPieceLowerCase", vocab_file=str(write_bert(folder))
        ),
        *map(of_pieces, (LLAMA_DECODER, decoders.Metaspace())),
        of_pieces(decoders.Metaspace(prepend_scheme="never")),
    ]
    options: list[dict[str, object]] = [
        *({}, {"add_dummy_prefix": False}, {"remove_extra_whitespaces": False}),
        {"byte_fallback": True, "vocab_size": 330},
    ]
    for number, option in enumerate(options):
        (folder / str(number)).mkdir()
        model = str(write_sentencepiece(folder / str(number), **option))
        made += [
            build_tokenizer(tokenizer_type=name, tokenizer_model=model, vocab_extra_ids=2)
            for name in ("SentencePieceTokenizer", "Llama2Tokenizer")
        ]
    return made


def test_parts_join_to_what_the_tokenizer_decodes_at_once(every_tokenizer: list[Tokenizer]) -> None:
    @examples(400)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        tokenizer = data.draw(st.sampled_from(every_tokenizer))
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
        whole = tokenizer.detokenize(ids)
        if REPLACED not in whole:  # of bytes that are no text, libraries differ
            assert text_rules(tokenizer).text(ids) == whole

    check()


@pytest.mark.parametrize("text", ["h\u00e9llo", "\u65e5\u672c\u8a9e", "a\U0001f642b", "\ufffd"])
def test_a_character_of_several_tokens_appears_when_it_is_complete(text: str) -> None:
    tokenizer = build_tokenizer(tokenizer_type="ByteTokenizer")
    rules = text_rules(tokenizer)
    parts = rules.start()
    pieces = [parts.add(token) for token in tokenizer.tokenize(text)]
    assert [piece for piece in pieces if piece] == list(text)
    assert parts.end() == ""


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    parts = text_rules(build_tokenizer(tokenizer_type="ByteTokenizer")).start()
    assert [parts.add(token) for token in "\u65e5".encode()[:2]] == ["", ""]
    assert parts.end() == REPLACED


def test_the_first_token_of_a_continuation_keeps_its_space(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(
        tokenizer_type="Llama2Tokenizer", tokenizer_model=str(write_sentencepiece(tmp_path))
    )
    rules = text_rules(tokenizer)
    before, after = tokenizer.tokenize("the quick"), tokenizer.tokenize("brown")[1:]
    assert rules.text(after) == "brown"
    assert rules.text(after, before[:1]) == "brown"  # the token that begins every text is no text
    assert rules.text(after, before) == " brown"


def test_a_row_of_the_model_that_is_no_token_has_no_text(
    every_tokenizer: list[Tokenizer],
) -> None:
    for tokenizer in every_tokenizer:
        rules, last = text_rules(tokenizer), tokenizer.vocab_size - 1
        assert rules.bytes_of(tokenizer.vocab_size) == b""
        text = rules.text([last, last])
        assert rules.text([last, tokenizer.vocab_size, last]) == text


def test_tokens_that_depend_on_their_neighbours_continue_a_prompt() -> None:
    rules = text_rules(build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=20))
    assert not rules.is_joined
    assert rules.text([3, 17], before=[4]) == " 3 17"
