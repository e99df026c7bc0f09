"""Dialogues to the corpus that supervised finetuning reads: tokens, and which of them are learned.

Each line of the input is a JSON object with a list of `{"role", "content"}` messages. A template
writes them out; answers are tokenized by themselves, so that no token is half given and half
learned. Packing into rows is left to `megatron.data.samples.sft_dataset`.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from megatron import log
from megatron.data.corpus.metadata import CorpusMetadata, digests_of_files
from megatron.data.corpus.paths import corpus_files
from megatron.data.indexed_dataset import best_fitting_dtype
from megatron.data.samples.chat_template import (
    ChatTemplate,
    EncodedDialogue,
    encode_dialogue,
    messages_of,
    template_of,
)
from megatron.data.samples.sft_dataset import PARTS, SFTCorpusBuilder, part_prefix
from megatron.errors import ConfigError, DataError
from megatron.program import run_program
from megatron.tokenizer.tokenizer import Tokenizer
from tools.flags.tokenizer import add_tokenizer_flags, tokenizer_spec
from tools.preprocessing.documents import (
    PARQUET,
    DocumentFile,
    DocumentRow,
    find_inputs,
    is_text,
    record_of,
)
from tools.preprocessing.text_output import refuse_existing_texts

_TOLD = 3  # left-out lines that are listed one by one; the rest is counted

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]


def main(argv: list[str] | None = None) -> None:
    """Read, render, tokenize, write, and print what was written; raises MegatronError."""
    args = _parse(argv)
    spec = tokenizer_spec(args)
    tokenizer = spec.build()
    template = template_of(args.template)
    _check_template(template, tokenizer)
    files = find_inputs(args.input).files
    for path in files:
        if is_text(path) or path.suffix == PARQUET:
            raise ConfigError(
                "dialogues are read from lines of JSON, and this file has none",
                found=str(path),
                fix="write the dialogues as .jsonl, one a line",
            )
    outputs = [
        path for part in PARTS for path in corpus_files(part_prefix(args.output_prefix, part))
    ]
    refuse_existing_texts(outputs, overwrite=args.overwrite)
    Path(args.output_prefix).absolute().parent.mkdir(parents=True, exist_ok=True)
    metadata = CorpusMetadata(
        tokenizer_type=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        json_key=args.json_key,
        tokenizer_files=digests_of_files(spec.files()),
    )
    left_out: list[DataError] = []
    on_bad = _raise if args.on_bad_line == "error" else left_out.append
    dtype = best_fitting_dtype(tokenizer.vocab_size)
    with SFTCorpusBuilder(args.output_prefix, dtype, metadata=metadata) as builder:
        for dialogue in _dialogues(files, args.json_key, template, tokenizer, on_bad):
            builder.add(dialogue)
        if not builder.num_dialogues:
            raise DataError(
                "no dialogue is left, so there is nothing to write",
                found=f"{len(left_out)} bad lines in {len(files)} files",
                fix="check --input and --json-key",
            )
    for error in left_out[:_TOLD]:
        log.warning(f"left out: {error}")
    if left_out:
        log.warning(f"left out {len(left_out)} lines that hold no usable dialogue")
    share = builder.num_targets / builder.num_tokens
    print(
        f"{builder.num_dialogues} dialogues, {builder.num_tokens} tokens, of which "
        f"{builder.num_targets} ({share:.1%}) are learned"
    )
    print(args.output_prefix)


def dialogue_of(
    path: Path,
    row: DocumentRow,
    *,
    key: str,
    template: ChatTemplate,
    encode: Encode,
    eod: int | None,
) -> EncodedDialogue:
    """Return the tokens of the row's dialogue; DataError with the file and the line."""
    place = f"{path}:{row.line}"
    record = record_of(path, row)
    if key not in record:
        raise DataError(
            f"the line has no key {key!r}",
            found=f"{place}: keys {', '.join(map(repr, record)) or '(none)'}",
            fix="name the key of the messages with --json-key",
        )
    try:
        return encode_dialogue(template.render(messages_of(record[key])), encode, eod=eod)
    except DataError as error:
        raise DataError(error.problem, found=f"{place}: {error.found}", fix=error.fix) from error


def _dialogues(
    files: Sequence[Path],
    key: str,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    on_bad: Callable[[DataError], None],
) -> Iterator[EncodedDialogue]:
    encode = _encoder(tokenizer)
    size = sum(path.stat().st_size for path in files)
    with tqdm(total=size, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        for path in files:
            source = DocumentFile(path)
            before = 0
            for row in source:
                try:
                    yield dialogue_of(
                        path, row, key=key, template=template, encode=encode, eod=tokenizer.eod
                    )
                except DataError as error:
                    on_bad(error)
                bar.update(source.read_bytes - before)
                before = source.read_bytes


def _encoder(tokenizer: Tokenizer) -> Encode:
    """Return the tokenizer, with its leading tokens on the first piece only."""
    opens = tokenizer.bos is not None and tokenizer.tokenize("a")[:1] == [tokenizer.bos]
    if not opens:
        return tokenizer.tokenize_batch

    def encode(texts: Sequence[str]) -> list[list[int]]:
        first, *rest = tokenizer.tokenize_batch(texts)
        return [first, *(ids[1:] for ids in rest)]

    return encode


def _check_template(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    if template.ends_document and tokenizer.eod is None:
        raise ConfigError(
            f"the template {template.name} ends answers with a token that the tokenizer lacks",
            found=f"{tokenizer.name}: {tokenizer.eod_note or 'no end-of-document token'}",
            fix="use --template chatml, or a tokenizer with an end-of-document token",
        )
    end = template.end
    if not end and not template.ends_document:
        raise ConfigError(
            "the template ends answers with nothing, so a model would not learn to stop",
            found=f"--template {template.name}",
            fix="use --template chatml, or a template that writes eos_token after an answer",
        )
    count = len(tokenizer.tokenize(end)) if end else 0
    if count > 1:
        log.warning(
            f"{tokenizer.name} spells {end!r} with {count} tokens, as it is not in the "
            "vocabulary: the end of an answer has to be looked for as text"
        )


def _raise(error: DataError) -> None:
    raise error


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="preprocess_sft.py",
        description="Write dialogues as tokens and loss masks for supervised finetuning.",
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=".jsonl or .json files (also .gz, .zst), or folders of them",
    )
    add("--json-key", default="messages", help="key of the list of messages [messages]")
    add(
        "--template",
        metavar="chatml|plain|FOLDER",
        default="chatml",
        help="how messages are written out: with <|im_start|> and <|im_end|>; under plain headings "
        "with the end-of-document token behind each answer; or as the chat template of a Hugging "
        "Face folder does [chatml]",
    )
    add(
        "--on-bad-line",
        choices=("error", "skip"),
        default="error",
        help="what a line without a usable dialogue does: end the run, or be counted [error]",
    )
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_tokens_document and PREFIX_mask_document, each .bin and .idx",
    )
    add("--overwrite", action="store_true", help="replace outputs that exist")
    add_tokenizer_flags(parser.add_argument_group("tokenizer"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
