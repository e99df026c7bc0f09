"""Several .bin/.idx corpora as one: the bytes that preprocessing all of their text would give.

Items and documents stay in the order of the inputs. Every pair is opened and checked before
anything is written, and the result appears whole or not at all. A reader would expect sidecars to
be optional here as elsewhere; they are, but without them the tokenizers cannot be compared.
"""

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from megatron import log
from megatron.data.corpus.metadata import CorpusMetadata, ItemLevel
from megatron.data.corpus.paths import corpus_files
from megatron.data.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    index_file_path,
)
from megatron.errors import ConfigError, DataError
from megatron.program import run_program
from tools.preprocessing.corpus_merge import (
    METHODS,
    Merge,
    merge_on_ranks,
    require_space_for_merge,
    space_of,
)
from tools.preprocessing.ranks import ToolRanks
from tools.preprocessing.text_output import refuse_existing_texts

# What must be equal for ids to mean the same in all parts.
_MUST_AGREE = ("tokenizer_type", "vocab_size", "eod", "level")


def main(argv: list[str] | None = None) -> None:
    """Check the inputs, merge them and print what was written; raises MegatronError."""
    args = _parse(argv)
    with ToolRanks.join() as ranks:
        prefixes: list[str] = []
        if ranks.is_first:
            refuse_existing_texts(corpus_files(args.output_prefix), overwrite=args.overwrite)
            prefixes = find_corpora(args.input)
        if args.merge == METHODS[0]:
            _require_one_rank(ranks)
            merge(prefixes, args.output_prefix)
        else:
            merge_together(ranks, prefixes, args.output_prefix)


def find_corpora(given: Sequence[str]) -> list[str]:
    """Return the corpora of prefixes and folders; those of a folder in sorted order."""
    prefixes: list[str] = []
    for name in given:
        if not Path(name).is_dir() or Path(index_file_path(name)).exists():
            prefixes.append(name)
            continue
        inside = sorted(path.name for path in Path(name).iterdir())
        stems = sorted({n[:-4] for n in inside if n.endswith((".bin", ".idx"))})
        if not stems:
            raise DataError(
                "the input folder holds no corpus",
                found=f"{name} with {len(inside)} other files",
                fix="give a folder of .bin/.idx pairs, or the prefix of each corpus",
            )
        prefixes += [str(Path(name) / stem) for stem in stems]
    return prefixes


def merge(prefixes: Sequence[str], output: str) -> None:
    """Write the corpora `prefixes`, in this order, as the corpus `output`."""
    started = time.perf_counter()
    corpora, metadata = _checked(prefixes, output)
    sizes = [corpus.num_tokens * corpus.dtype.itemsize for corpus in corpora]
    with (
        MMapIndexedDatasetBuilder(output, corpora[0].dtype, metadata=metadata) as builder,
        _bar(sum(sizes)) as bar,
    ):
        for number, (corpus, size) in enumerate(zip(corpora, sizes), start=1):
            corpus.check_unchanged()
            builder.merge_file_(corpus.prefix)
            corpus.check_unchanged()
            bar.update(size)
            if bar.disable:
                print(f"{number} of {len(corpora)} | {size} bytes | {corpus.prefix}", flush=True)
    _log_result(len(corpora), output, time.perf_counter() - started)


def merge_together(ranks: ToolRanks, prefixes: Sequence[str], output: str) -> None:
    """Merge on all ranks, each writing a part; `prefixes` of the first rank count."""
    started = time.perf_counter()
    if not ranks.is_first:
        merge_on_ranks(ranks, [])
        return
    corpora, metadata = _checked(prefixes, output)
    own = sum(corpus.num_tokens * corpus.dtype.itemsize for corpus in corpora) // ranks.size
    with _bar(own) as bar:
        merge_on_ranks(ranks, [Merge(output, prefixes, metadata)], progress=bar.update)
    _log_result(len(corpora), output, time.perf_counter() - started)


def _checked(
    prefixes: Sequence[str], output: str
) -> tuple[list[MMapIndexedDataset], CorpusMetadata | None]:
    """Return the opened inputs, which belong together, and the metadata of the sidecar."""
    _refuse_output_among_inputs(prefixes, output)
    corpora = [MMapIndexedDataset(prefix) for prefix in prefixes]
    _require_one_dtype(corpora)
    metadata = _common_metadata(corpora)
    for prefix in sorted({p for p in prefixes if list(prefixes).count(p) > 1}):
        log.warning(f"{prefix} is merged {list(prefixes).count(prefix)} times over")
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    require_space_for_merge(output, space_of(corpora))
    return corpora, metadata


def _bar(total: int) -> "tqdm[object]":
    return tqdm(total=total, unit="B", unit_scale=True, disable=not sys.stderr.isatty())


def _log_result(inputs: int, output: str, seconds: float) -> None:
    merged = MMapIndexedDataset(output)
    print(
        f"merged {inputs} corpora into {len(merged.doc_idx) - 1} documents, {len(merged)} "
        f"items, {merged.num_tokens} tokens in {seconds:.1f} s"
    )
    print(f"--data-path {output}")


def _refuse_output_among_inputs(prefixes: Sequence[str], output: str) -> None:
    """Refuse an output that is an input, by file identity too, to notice links."""
    for prefix in prefixes:
        by_name = Path(prefix).resolve() == Path(output).resolve()
        pairs = zip(corpus_files(output), corpus_files(prefix))
        if by_name or any(a.exists() and b.exists() and os.path.samefile(a, b) for a, b in pairs):
            raise ConfigError(
                "the output is one of the inputs",
                found=f"--output-prefix {output} and input {prefix}",
                fix="give the merged corpus a name of its own",
            )


def _require_one_dtype(corpora: Sequence[MMapIndexedDataset]) -> None:
    first = corpora[0]
    for other in corpora[1:]:
        if other.dtype != first.dtype:
            raise DataError(
                "corpora of different token types cannot be merged",
                found=f"{first.prefix} has {first.dtype.name}, "
                f"{other.prefix} has {other.dtype.name}",
                fix="preprocess both with the same tokenizer",
            )


def _common_metadata(corpora: Sequence[MMapIndexedDataset]) -> CorpusMetadata | None:
    """Return the metadata common to all sidecars; None, with a note, if one is missing."""
    described = [corpus for corpus in corpora if corpus.metadata is not None]
    for other in described[1:]:
        _require_agreement(described[0], other)
    without = [corpus.prefix for corpus in corpora if corpus.metadata is None]
    if without:
        log.warning(
            f"{len(without)} of {len(corpora)} inputs have no sidecar (.meta.json), the first "
            f"{without[0]}: their tokenizers are unknown, and the output gets none"
        )
        return None
    metadata = described[0].metadata
    keys = sorted({corpus.metadata.json_key for corpus in described if corpus.metadata is not None})
    if metadata is not None and len(keys) > 1:
        log.warning(
            f"the inputs were made from different JSON keys ({', '.join(keys)}); the sidecar of "
            f"the output records {metadata.json_key}"
        )
    return None if metadata is None else replace(metadata, sentence_splitter=_splitters(described))


def _splitters(described: Sequence[MMapIndexedDataset]) -> str:
    """Return the sentence splitters of all inputs; warn if there are several."""
    found = {each.metadata.sentence_splitter for each in described if each.metadata is not None}
    names = sorted(found - {""})
    if len(names) > 1:
        log.warning(f"the inputs were split into sentences in different ways: {'; '.join(names)}")
    return "; ".join(names)


def _require_agreement(first: MMapIndexedDataset, other: MMapIndexedDataset) -> None:
    one, two = first.metadata, other.metadata
    different = [name for name in _MUST_AGREE if getattr(one, name) != getattr(two, name)]
    found = [getattr(each, name) for name in different[:1] for each in (one, two)]
    found = [str(value) if isinstance(value, ItemLevel) else value for value in found]
    if not different and one is not None and two is not None:
        # Older sidecars do not record the files of the tokenizer.
        found = [sorted(each.tokenizer_files.items()) for each in (one, two)]
        contents = [sorted(each.tokenizer_files.values()) for each in (one, two)]
        different = ["tokenizer_files"] if all(contents) and contents[0] != contents[1] else []
    if different:
        raise DataError(
            f"corpora that differ in {different[0]} cannot be merged",
            found=f"{first.prefix} has {found[0]!r}, {other.prefix} has {found[1]!r}",
            fix="preprocess both with the same tokenizer and flags",
        )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="merge_datasets.py", description="Merge .bin/.idx corpora into one, in order."
    )
    add = parser.add_argument
    add(
        "--input",
        "--datasets",
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="corpora in the order of the output: prefixes, or folders (sorted by name)",
    )
    add("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin and .idx")
    add("--overwrite", action="store_true", help="replace an output that exists")
    add(
        "--merge",
        choices=METHODS,
        default=METHODS[0],
        help="by this process, or by all that torchrun started: each writes its range of the one "
        ".bin, which all machines must be able to write at once [serial]",
    )
    return parser.parse_args(argv)


def _require_one_rank(ranks: ToolRanks) -> None:
    if ranks.size > 1:
        raise ConfigError(
            "several ranks were started for a merge by one process",
            found=f"WORLD_SIZE={ranks.size} with --merge serial",
            fix="add --merge distributed, or start it without torchrun",
        )


if __name__ == "__main__":
    run_program(main)
