"""Print the content of a corpus; verify it, show samples of it, or adopt it from another tool.

    python tools/inspect_dataset.py PREFIX [--verify] [--sample N --tokenizer-type TYPE ...]
                                    [--write-sidecar] [--json]

Needs no torch. Exit code 65 when the corpus is missing or damaged. `--write-sidecar` declares the
bytes as they are now to be right: earlier damage cannot be detected.
"""

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from megatron import log
from megatron.config.data import DataIntegrity
from megatron.data.corpus.checksums import CorpusChecksums, adopt, read_checksums
from megatron.data.corpus.metadata import (
    CorpusMetadata,
    ItemLevel,
    digests_of_files,
    write_metadata,
)
from megatron.data.corpus.paths import corpus_files, pairing_doubts
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.errors import ConfigError, DataError
from megatron.program import run_program
from megatron.tokenizer.tokenizer import Tokenizer
from tools.flags.tokenizer import add_tokenizer_flags, tokenizer_spec

_TOKENIZER_SOURCES = (
    "vocab_file",
    "merge_file",
    "tokenizer_model",
    "tokenizer_name_or_path",
    "vocab_size",
    "tiktoken_pattern",
)
_ITEMS_LOOKED_AT = 64  # for the summary that does not read everything
_TOKENS_SHOWN = 64


class DatasetView(NamedTuple):
    """Statistics of a few items, spread over the corpus."""

    items: int
    highest_token: int
    last_token: int  # the one that most items end with
    ends_with_it: int  # items of those looked at


def main(argv: list[str] | None = None) -> None:
    """Open the corpus, then do what was asked; raises MegatronError."""
    args = _parse(argv)
    tokenizer = tokenizer_spec(args).build() if args.tokenizer_type else None
    corpus = _open(args.prefix)
    if args.write_sidecar:
        _write_sidecar(corpus, tokenizer, args)
        corpus = _open(args.prefix)
    checksums = read_checksums(corpus.prefix)
    samples = _samples(corpus, tokenizer, args.sample)
    for doubt in _doubts(corpus, checksums):
        log.warning(doubt)
    if args.json:
        content = _plain(corpus, checksums) | {"samples": samples}
        print(json.dumps(content, indent=2))
    else:
        print("\n".join([*_lines(corpus, checksums), *_sample_lines(samples)]))
    if args.verify:
        _verify(corpus, checksums, tokenizer)
        if checksums is not None and not args.json:
            print(f"verified: {len(checksums.blocks)} blocks, {checksums.data_bytes:,} bytes")


def _open(prefix: str) -> MMapIndexedDataset:
    # Only the index is compared here, so that the summary is printed before --verify.
    has_checksums = read_checksums(prefix) is not None
    integrity = DataIntegrity.HEADER if has_checksums else DataIntegrity.OFF
    return MMapIndexedDataset(prefix, integrity=integrity)


def _verify(
    corpus: MMapIndexedDataset, checksums: CorpusChecksums | None, tokenizer: Tokenizer | None
) -> None:
    if checksums is None:
        raise DataError(
            f"the corpus {corpus.prefix} has no checksums, so its tokens cannot be verified",
            found=f"no {corpus.prefix}.sums",
            fix="if you trust its bytes as they are, add --write-sidecar",
        )
    corpus.verify()
    _require_vocabulary(corpus, tokenizer)


def _require_vocabulary(corpus: MMapIndexedDataset, tokenizer: Tokenizer | None) -> None:
    """Check that every token of the corpus is below the vocabulary size, where that is known."""
    named = corpus.metadata.tokenizer_type if corpus.metadata is not None else ""
    size = corpus.metadata.vocab_size if corpus.metadata is not None else 0
    if tokenizer is not None:
        named, size = tokenizer.name, tokenizer.vocab_size
    highest = max(int(np.frombuffer(piece, corpus.dtype).max()) for piece in corpus.pieces())
    if named and highest >= size:
        raise DataError(
            f"the corpus {corpus.prefix} holds tokens that its tokenizer does not have",
            found=f"token {highest}; {named} has {size} tokens",
            fix="give the tokenizer that the corpus was preprocessed with",
        )


def _write_sidecar(
    corpus: MMapIndexedDataset, tokenizer: Tokenizer | None, args: argparse.Namespace
) -> None:
    """Write checksums of the present bytes, and the sidecar, where its values are known."""
    checksums = read_checksums(corpus.prefix)
    metadata = corpus.metadata
    to_describe = not metadata.pair_id if metadata is not None else tokenizer is not None
    if checksums is not None and not to_describe:
        adopt(corpus.prefix)  # raises an error with the fix
    if tokenizer is not None:
        _require_vocabulary(corpus, tokenizer)
    if checksums is None:
        checksums = adopt(corpus.prefix)
    if metadata is None and tokenizer is not None:
        metadata = _described(corpus, tokenizer, args)
    if metadata is not None:
        write_metadata(corpus.prefix, dataclasses.replace(metadata, pair_id=checksums.pair_id))


def _described(
    corpus: MMapIndexedDataset, tokenizer: Tokenizer, args: argparse.Namespace
) -> CorpusMetadata:
    look = _look(corpus)
    ends = look.items and look.ends_with_it == look.items and look.last_token == tokenizer.eod
    return CorpusMetadata(
        tokenizer_type=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod if ends else None,
        level=_level(corpus),
        json_key="",
        num_items=len(corpus),
        num_documents=len(corpus.doc_idx) - 1,
        num_tokens=corpus.num_tokens,
        tokenizer_files=digests_of_files(tokenizer_spec(args).files()),
    )


def _level(corpus: MMapIndexedDataset) -> ItemLevel:
    is_document = len(corpus.doc_idx) - 1 >= len(corpus)
    return ItemLevel.DOCUMENT if is_document else ItemLevel.SENTENCE


def _spread(corpus: MMapIndexedDataset, count: int) -> list[int]:
    """Return `count` items or fewer that hold tokens, spread over the corpus."""
    filled = np.flatnonzero(corpus.sizes)
    at = np.linspace(0, len(filled) - 1, min(count, len(filled))).astype(np.int64)
    chosen: list[int] = filled[np.unique(at)].tolist()
    return chosen


def _look(corpus: MMapIndexedDataset) -> DatasetView:
    items = [corpus.get(item) for item in _spread(corpus, _ITEMS_LOOKED_AT)]
    ((last, times),) = Counter(int(tokens[-1]) for tokens in items).most_common(1)
    return DatasetView(len(items), max(int(tokens.max()) for tokens in items), last, times)


def _samples(
    corpus: MMapIndexedDataset, tokenizer: Tokenizer | None, count: int
) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    for item in _spread(corpus, count) if count else ():
        size = int(corpus.sizes[item])
        ids = corpus.get(item, 0, min(size, _TOKENS_SHOWN)).tolist()
        sample: dict[str, Any] = {"item": item, "tokens": size, "ids": ids}
        if tokenizer is not None:
            if max(ids) >= tokenizer.vocab_size:
                _require_vocabulary(corpus, tokenizer)
            sample["text"] = tokenizer.detokenize(ids)
        samples.append(sample)
    return samples


def _doubts(corpus: MMapIndexedDataset, checksums: CorpusChecksums | None) -> list[str]:
    """Return signs that .bin and .idx are not a pair, where there are no checksums."""
    return pairing_doubts(corpus.prefix) if checksums is None else []


def _plain(corpus: MMapIndexedDataset, checksums: CorpusChecksums | None) -> dict[str, Any]:
    sizes = corpus.sizes
    files = [path for path in corpus_files(corpus.prefix) if path.is_file()]
    return {
        "prefix": corpus.prefix,
        "files": {str(path): path.stat().st_size for path in files},
        "dtype": corpus.dtype.name,
        "items": len(corpus),
        "documents": len(corpus.doc_idx) - 1,
        "tokens": corpus.num_tokens,
        "has_modes": corpus.modes is not None,
        "tokens_per_item": {
            "min": int(sizes.min()),
            "mean": corpus.num_tokens / len(corpus),
            "max": int(sizes.max()),
            "empty": int((sizes == 0).sum()),
        },
        "metadata": None if corpus.metadata is None else dataclasses.asdict(corpus.metadata),
        "checksums": None
        if checksums is None
        else {
            "pair_id": checksums.pair_id,
            "blocks": len(checksums.blocks),
            "block_bytes": checksums.block_bytes,
        },
        "level": _level(corpus) if corpus.metadata is None else corpus.metadata.level,
        "look": _look(corpus)._asdict(),
        "doubts": _doubts(corpus, checksums),
    }


def _lines(corpus: MMapIndexedDataset, checksums: CorpusChecksums | None) -> list[str]:
    plain = _plain(corpus, checksums)
    each, look = plain["tokens_per_item"], DatasetView(**plain["look"])
    lines = [
        corpus.prefix,
        *(f"  {name}  {size:,} bytes" for name, size in plain["files"].items()),
        f"{plain['items']:,} items in {plain['documents']:,} documents, {plain['tokens']:,} tokens "
        f"of {plain['dtype']}{', with the mode of each item' if plain['has_modes'] else ''}",
        f"tokens per item: {each['min']:,} to {each['max']:,}, {each['mean']:,.1f} on average; "
        f"{each['empty']:,} items are empty",
        f"of {look.items} items looked at: highest token {look.highest_token}, "
        f"{look.ends_with_it} end with token {look.last_token}",
    ]
    if corpus.metadata is None:
        lines.append(f"no sidecar; by its borders each item is a {plain['level']}")
    else:
        lines.append("sidecar:")
        lines += [f"  {name}: {json.dumps(value)}" for name, value in plain["metadata"].items()]
    if checksums is None:
        lines.append("no checksums: changed tokens cannot be found")
    else:
        lines.append(
            f"checksums: {len(checksums.blocks):,} blocks of {checksums.block_bytes:,} bytes, "
            f"pair id {checksums.pair_id}"
        )
    return lines


def _sample_lines(samples: list[dict[str, Any]]) -> list[str]:
    return [
        f"item {sample['item']} ({sample['tokens']:,} tokens): "
        + json.dumps(sample.get("text", sample["ids"]), ensure_ascii=False)
        for sample in samples
    ]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="inspect_dataset.py", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("prefix", help="the corpus, without .bin or .idx")
    add("--verify", action="store_true", help="compare every byte with the checksums")
    add("--sample", type=int, default=0, metavar="N", help="show the beginning of N items [0]")
    add("--write-sidecar", action="store_true", help="add checksums to a corpus that has none")
    add("--json", action="store_true", help="print JSON for programs")
    group = parser.add_argument_group("tokenizer, for text and for the sidecar")
    add_tokenizer_flags(group, required=False)
    args = parser.parse_args(argv)
    if args.sample < 0:
        raise ConfigError(
            "the number of samples is negative",
            found=f"--sample {args.sample}",
            fix="use 0 or more",
        )
    given = [name for name in _TOKENIZER_SOURCES if getattr(args, name) is not None]
    if given and args.tokenizer_type is None:
        raise ConfigError(
            "the files of a tokenizer are given, but not which kind it is",
            found=", ".join(f"--{name.replace('_', '-')}" for name in given),
            fix="add --tokenizer-type, as it was for preprocess_data.py",
        )
    return args


if __name__ == "__main__":
    run_program(main)
