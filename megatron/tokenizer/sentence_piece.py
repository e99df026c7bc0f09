"""SentencePiece models, under their three names in Megatron, and as T5's.

They differ in more than name. SentencePieceTokenizer adds <CLS> <SEP> <EOD> <MASK> and missing
<PAD> <BOS> <EOS> behind the model's pieces, in that order, and ends documents with <EOD>.
GPTSentencePieceTokenizer adds nothing and ends them with the model's </s>. Llama2Tokenizer is the
latter and opens every text with <s>. T5SentencePieceTokenizer is GPT's with the sentinels of
--vocab-extra-ids in falling order, <extra_id_0> last, as T5's releases number them; their names in
a text are sentinels, where in the others they are text.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sentencepiece

from megatron.errors import DataError
from megatron.tokenizer.protocol import (
    SpecialIds,
    Tokenizer,
    checked_ids,
    existing_file,
    extra_names,
)

_T5 = "T5SentencePieceTokenizer"
_SENTINEL = "<extra_id_"


@dataclass(frozen=True, kw_only=True)
class SentencePieceTokenizer(SpecialIds):
    """A SentencePiece model and the tokens added behind it."""

    name: str
    processor: Any = field(repr=False)  # sentencepiece.SentencePieceProcessor has no types
    added: tuple[str, ...] = ()  # ids from the model's own size on
    opens_with_bos: bool = False
    named_in_text: bool = False  # sentinels, by their names

    @property
    def vocab_size(self) -> int:
        """The model's pieces and the added tokens."""
        return int(self.processor.get_piece_size()) + len(self.added)

    def tokenize(self, text: str) -> list[int]:
        if self.named_in_text and _SENTINEL in text:
            return self._with_sentinels(text)
        return self._opened(self.processor.encode(text))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self.named_in_text:
            return [self.tokenize(text) for text in texts]
        # One thread: the number of --workers is the number of cores that are used.
        return [self._opened(ids) for ids in self.processor.encode(list(texts), num_threads=1)]

    def detokenize(self, ids: Iterable[int]) -> str:
        size = self.processor.get_piece_size()
        parts: list[str] = []
        run: list[int] = []
        for token in checked_ids(ids, self.vocab_size):
            if token < size:
                run.append(token)
            else:
                parts += [self.processor.decode(run), self.added[token - size]]
                run = []
        return "".join([*parts, self.processor.decode(run)])

    def piece(self, token_id: int) -> str:
        token, size = checked_ids([token_id], self.vocab_size)[0], self.processor.get_piece_size()
        return str(self.processor.id_to_piece(token)) if token < size else self.added[token - size]

    def _with_sentinels(self, text: str) -> list[int]:
        sentinels = {self.piece(token): token for token in self.extra_ids}
        ids: list[int] = []
        for part in re.split(f"({_SENTINEL}[0-9]+>)", text):
            ids += [sentinels[part]] if part in sentinels else self.processor.encode(part)
        return ids

    def _opened(self, ids: list[int]) -> list[int]:
        return [self.bos, *ids] if ids and self.opens_with_bos and self.bos is not None else ids


def build(name: str, *, tokenizer_model: str, vocab_extra_ids: int = 0) -> Tokenizer:
    """Read a `.model` file; `name` selects the tokens added behind it."""
    path = existing_file(tokenizer_model, "--tokenizer-model")
    processor = _read_model(path)
    # SentencePiece has -1 for a token that the model was trained without.
    own = {
        role: (token if token >= 0 else None)
        for role, token in (
            ("pad", processor.pad_id()),
            ("bos", processor.bos_id()),
            ("eos", processor.eos_id()),
        )
    }
    wanted: list[str] = []
    if name == "SentencePieceTokenizer":
        wanted = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]
        wanted += [f"<{role.upper()}>" for role, token in own.items() if token is None]
    sentinels = extra_names(vocab_extra_ids)
    wanted += reversed(sentinels) if name == _T5 else sentinels
    id_of_piece = {
        processor.id_to_piece(token): token for token in range(processor.get_piece_size())
    }
    added = tuple(token for token in wanted if token not in id_of_piece)
    ids = id_of_piece | {token: len(id_of_piece) + index for index, token in enumerate(added)}
    named = ids if name == "SentencePieceTokenizer" else {}
    return SentencePieceTokenizer(
        name=name,
        processor=processor,
        added=added,
        opens_with_bos=name == "Llama2Tokenizer",
        named_in_text=name == _T5,
        eod=named.get("<EOD>", own["eos"]),
        eod_note=_eod_note(path, own["eos"], named),
        pad=own["pad"] if own["pad"] is not None else named.get("<PAD>"),
        bos=own["bos"] if own["bos"] is not None else named.get("<BOS>"),
        unk=processor.unk_id(),
        cls=named.get("<CLS>"),
        sep=named.get("<SEP>"),
        mask=named.get("<MASK>"),
        extra_ids=tuple(ids[token] for token in sentinels),
    )


def _eod_note(path: Path, eos: int | None, named: dict[str, int]) -> str:
    if "<EOD>" in named:
        return f"<EOD>, among or behind the pieces of {path}"
    return f"looked for the end-of-sentence piece of {path}" + (
        "" if eos is not None else ": the model was trained without one (eos_id=-1)"
    )


def _read_model(path: Path) -> Any:
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise DataError(
            "the SentencePiece model cannot be read",
            found=f"--tokenizer-model {path}: {error}",
            fix="give the binary .model file that SentencePiece training wrote, complete",
        ) from error
