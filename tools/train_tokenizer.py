"""Trains a tokenizer: a byte-level BPE in the form of GPT-2's, or a WordPiece in that of BERT's.

The same text gives the same files, byte for byte. BPE: vocab.json and merges.txt are for
GPT2BPETokenizer, tokenizer.json for HFTokenizer; they agree on every text that does not hold the
name <|endoftext|> itself, which is the last id, as in GPT-2. WordPiece: vocab.txt is for
BertWordPieceLowerCase.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from tqdm import tqdm

from megatron.errors import ConfigError, DataError
from megatron.program import run_program
from megatron.tokenizer.bert_wordpiece import SPECIAL_TOKENS
from megatron.tokenizer.protocol import END_OF_TEXT
from tools.preprocessing.documents import TEXT_RULES, DocumentFile, TextRule, find_inputs, texts
from tools.preprocessing.text_output import refuse_existing_texts, write_text_files

_BYTES = 256

Documents = Callable[[], Iterator[str]]  # the texts from the first on, each time it is called
OUTPUT_NAMES = ("vocab.json", "merges.txt", "tokenizer.json")
WORDPIECE_NAMES = ("vocab.txt",)
BPE, WORDPIECE = "bpe", "wordpiece"


def main(argv: list[str] | None = None) -> None:
    """Train on the input files and write the three files; raises MegatronError."""
    args = _parse(argv)
    folder = Path(args.output)
    names = WORDPIECE_NAMES if args.type == WORDPIECE else OUTPUT_NAMES
    learn = train_wordpiece if args.type == WORDPIECE else train
    refuse_existing_texts([folder / name for name in names], overwrite=args.overwrite)
    files = find_inputs(args.input).files
    rule = TextRule(args.text_documents)
    with tqdm(
        total=sum(path.stat().st_size for path in files),
        unit="B",
        unit_scale=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        trained = learn(
            lambda: _counted(texts(files, args.json_key, rule), bar),
            vocab_size=args.vocab_size,
            min_frequency=args.min_frequency,
        )
    folder.mkdir(parents=True, exist_ok=True)
    contents = _lines(trained) if args.type == WORDPIECE else _contents(trained)
    write_text_files({folder / name: text for name, text in contents.items()})
    size = trained.get_vocab_size()
    if size < args.vocab_size:
        print(
            f"the text was too small for --vocab-size {args.vocab_size}: the vocabulary has {size}"
        )
    print(f"wrote {size} pieces to {', '.join(str(folder / name) for name in names)}")


def train(documents: Documents, *, vocab_size: int, min_frequency: int = 2) -> tokenizers.Tokenizer:
    """Return a byte-level BPE of at most `vocab_size` pieces, the last one <|endoftext|>."""
    if vocab_size < _BYTES + 1:
        raise ConfigError(
            "the vocabulary has no room for every byte and the end of a document",
            found=f"--vocab-size {vocab_size}",
            fix=f"use --vocab-size {_BYTES + 1} or more",
        )
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.train_from_iterator(
        documents(),
        trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            min_frequency=min_frequency,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=sys.stderr.isatty(),
        ),
    )
    model = json.loads(learner.to_str())["model"]
    if not model["merges"]:
        raise DataError(
            "no pair of letters occurs often enough to learn from",
            found=f"{len(model['vocab'])} pieces, all of one byte",
            fix="give more text (--input), or --min-frequency 1",
        )
    vocab = model["vocab"] | {END_OF_TEXT: len(model["vocab"])}
    trained = tokenizers.Tokenizer(models.BPE(vocab, [tuple(pair) for pair in model["merges"]]))
    trained.pre_tokenizer = learner.pre_tokenizer
    trained.decoder = decoders.ByteLevel()
    trained.post_processor = processors.ByteLevel(trim_offsets=False)
    trained.add_special_tokens([END_OF_TEXT])
    return trained


def train_wordpiece(
    documents: Documents, *, vocab_size: int, min_frequency: int = 2
) -> tokenizers.Tokenizer:
    """Return a lower-casing WordPiece of at most `vocab_size` pieces.

    BERT's special tokens come first.
    """
    learner = tokenizers.Tokenizer(models.WordPiece(unk_token=SPECIAL_TOKENS[1]))
    learner.normalizer = normalizers.BertNormalizer(lowercase=True)
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found = {letter for text in documents() for letter in learner.normalizer.normalize_str(text)}
    letters = sorted(letter for letter in found if not letter.isspace())
    if not letters:
        raise DataError(
            "there is nothing to learn a vocabulary from",
            found="a text without a letter",
            fix="give more text (--input)",
        )
    # Letters inside a word would get their ids in an order that differs from run to run, and with
    # them which of two equally frequent pairs is joined: so their ids are set beforehand.
    special = [*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters)]
    if vocab_size <= len(special):
        raise ConfigError(
            "the vocabulary has no room for more than the special tokens and every letter",
            found=f"--vocab-size {vocab_size}, {len(letters)} different letters in the text",
            fix=f"use --vocab-size {2 * len(special)} or more",
        )
    learner.train_from_iterator(
        documents(),
        trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            special_tokens=special,
            show_progress=sys.stderr.isatty(),
        ),
    )
    return learner


def _counted(documents: Iterator[tuple[DocumentFile, str]], bar: tqdm) -> Iterator[str]:
    bar.reset()
    done, current, seen = 0, None, 0
    for source, text in documents:
        if source is not current:
            done += current.size_bytes if current is not None else 0
            current = source
        bar.update(done + source.read_bytes - seen)
        seen = done + source.read_bytes
        yield text


def _contents(trained: tokenizers.Tokenizer) -> dict[str, str]:
    """Return the content of each output file."""
    model = json.loads(trained.to_str())["model"]
    by_id = dict(sorted(model["vocab"].items(), key=lambda pair: pair[1]))
    merges = "".join(" ".join(pair) + "\n" for pair in model["merges"])
    return {
        "vocab.json": json.dumps(by_id, ensure_ascii=False) + "\n",
        "merges.txt": "#version: 0.2\n" + merges,
        "tokenizer.json": trained.to_str(pretty=True) + "\n",
    }


def _lines(trained: tokenizers.Tokenizer) -> dict[str, str]:
    """Return vocab.txt: one piece per line, in the order of ids."""
    by_id = sorted(trained.get_vocab().items(), key=lambda pair: pair[1])
    return {WORDPIECE_NAMES[0]: "".join(f"{piece}\n" for piece, _ in by_id)}


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train_tokenizer.py",
        description="Train a byte-level BPE or a WordPiece tokenizer on text.",
    )
    add = parser.add_argument
    add(
        "--type",
        choices=(BPE, WORDPIECE),
        default=BPE,
        help="bpe as GPT-2 has it, or wordpiece as BERT has it [bpe]",
    )
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=".jsonl, .json or .txt files (also .gz, .zst), or folders of them",
    )
    add("--output", required=True, metavar="FOLDER", help="folder for the files")
    add("--vocab-size", type=int, default=4096, help="pieces, special tokens included [4096]")
    add("--min-frequency", type=int, default=2, help="a rarer pair is not merged [2]")
    add("--json-key", default="text", help="key of the text in JSON lines [text]")
    add(
        "--text-documents",
        choices=TEXT_RULES,
        default="separator",
        help="what is one document of a .txt file; see preprocess_data.py [separator]",
    )
    add("--overwrite", action="store_true", help="replace files that exist")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
