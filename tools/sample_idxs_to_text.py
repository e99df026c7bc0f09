"""What a training run read, sample by sample: corpus, documents, tokens and text, as JSON lines.

Takes the flags of the run and replays its order: sample N is the N-th that all ranks together
consumed, whatever the number of ranks. A reader would expect the order to depend on data and seed
alone; the length of the run (--train-iters, --train-samples, batch sizes) belongs to it too.
Standard output holds samples and nothing else; all else goes to standard error.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("pretrain_gpt") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from megatron.arguments import parse_args
from megatron.config.data import DataLoaderKind
from megatron.config.run import RunConfig
from megatron.data.blendable_dataset import BlendableDataset
from megatron.data.data_samplers import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.kinds.dataset_kind import DatasetKind, dataset_kind
from megatron.data.samples.fim import FIMDataset
from megatron.data.samples.mlm_dataset import MLMDataset
from megatron.data.samples.packing import PackedDataset
from megatron.engine.base import DatasetRequest
from megatron.errors import ConfigError
from megatron.initialize import tokenizer_of
from megatron.lengths import batch_schedule, duration, num_samples
from megatron.program import run_program
from pretrain_gpt import gpt_task
from tools.preprocessing.text_output import refuse_existing_texts, write_text_files

_ENDS = 5  # tokens shown of each end of a sample without --all-tokens
# The model does not change what is read, so its flags may be left out.
_MODEL = {
    "num_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 1,
    "lr": 1e-4,
    "tokenizer_type": "GPT2BPETokenizer",
}


class SamplePiece(NamedTuple):
    """Tokens [start, stop) of an item of a corpus."""

    item: int
    start: int
    stop: int


class Origin(NamedTuple):
    """The source of a sample's tokens; `pieces` is None where the dataset lacks it."""

    corpus: str
    pieces: list[SamplePiece] | None


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags, build the training data as the run does, and print the samples."""
    config = parse_args(
        list(sys.argv[1:] if argv is None else argv),
        extra_args_provider=_add_flags,
        args_defaults=_MODEL,
    )
    start, stop = _range(config)
    samples = sys.stdout
    with redirect_stdout(sys.stderr):  # messages of the library are no samples
        if config.extra["output_file"]:
            output = Path(config.extra["output_file"])
            refuse_existing_texts([output], overwrite=config.extra["overwrite"])
            write_text_files({output: "".join(_lines(config, start, stop))})
            print(f"wrote {stop - start} samples to {output}")
        else:
            for line in _lines(config, start, stop):
                samples.write(line)


def _lines(config: RunConfig, start: int, stop: int) -> Iterator[str]:
    dataset = _training_data(config)
    rows = list(islice(_order(config, len(dataset), start), stop - start))
    if len(rows) < stop - start:
        raise ConfigError(
            "the range reaches beyond the samples of the run",
            found=f"--sample-id-range {start} {stop}; the index holds {len(dataset)}",
            fix=f"end the range at {len(dataset)}, or give the run's own --train-iters",
        )
    tokenizer = tokenizer_of(config) if config.extra["print_text"] else None
    for number, row in enumerate(rows, start=start):
        sample = dataset[row]
        # Span corruption has two parts, which a decoder reads one after the other.
        parts_of_row = [sample["text"]] if "text" in sample else list(sample.values())
        tokens = [token for part in parts_of_row for token in part.tolist()]
        origin = _origin(dataset, row)
        record: dict[str, Any] = {"sample": number, "row": row, "corpus": origin.corpus}
        if origin.pieces is not None:
            record["documents"] = [list(piece) for piece in origin.pieces]
        record["num_tokens"] = len(tokens)
        if config.extra["print_tokens"]:
            record["tokens"] = tokens if config.extra["all_tokens"] else _ends(tokens)
        if tokenizer is not None:
            parts = [tokens] if config.extra["all_tokens"] else _ends(tokens)
            texts = [tokenizer.detokenize(part) for part in parts]
            record["text"] = texts[0] if len(texts) == 1 else texts
        yield json.dumps(record) + "\n"


def _training_data(config: RunConfig) -> Any:
    batches = batch_schedule(config, config.extra["data_parallel_size"])
    length = duration(config, batches)
    wanted = num_samples(config.training, length, batches.global_batch_size)[0]
    request = DatasetRequest(
        data=config.data,
        # Windows of text can be shown without the files of their tokenizer.
        tokenizer=None if dataset_kind(config.data) is DatasetKind.GPT else tokenizer_of(config),
        num_samples=(wanted, 0, 0),
        min_samples=1,
        seed=config.training.seed,
        is_builder=True,
        wait=lambda: None,
    )
    train = gpt_task().datasets(request).train
    return next(iter(train.values())) if isinstance(train, dict) else train


def _order(config: RunConfig, total: int, start: int) -> Iterator[int]:
    """Yield the dataset's rows in the order of training, from sample `start` on."""
    one_by_one: dict[str, Any] = {
        "total_samples": total,
        "consumed_samples": start,
        "micro_batch_size": 1,
        "data_parallel_rank": 0,
        "data_parallel_size": 1,
    }
    if config.data.dataloader_type is DataLoaderKind.SINGLE:
        if start < total:
            yield from (row for (row,) in MegatronPretrainingSampler(**one_by_one))
        return
    sampler = MegatronPretrainingRandomSampler(**one_by_one, seed=config.training.seed)
    while True:
        yield from (row for (row,) in sampler)


def _origin(dataset: Any, row: int) -> Origin:
    if isinstance(dataset, BlendableDataset):
        part = dataset.datasets[int(dataset.dataset_index[row])]
        return _origin(part, int(dataset.dataset_sample_index[row]))
    if isinstance(dataset, FIMDataset | MLMDataset):
        # Sample i is made of window i, whose documents are the same in another order.
        return _origin(dataset.dataset if isinstance(dataset, FIMDataset) else dataset.windows, row)
    if isinstance(dataset, PackedDataset):
        return Origin(dataset.source.prefix, None)
    if not isinstance(dataset, GPTDataset):
        return Origin(type(dataset).__name__, None)
    arrays = {
        name: np.load(path, mmap_mode="r", allow_pickle=False)
        for name, path in dataset.index_files.items()
    }
    place = int(arrays["shuffle_idx"][row])
    (first, start), (last, stop) = arrays["sample_idx"][place : place + 2].tolist()
    items = arrays["doc_idx"][first : last + 1].tolist()
    pieces = []
    for number, item in enumerate(items):
        begin = start if number == 0 else 0
        # One token more than the next sample's start: the last token is only a label.
        end = stop + 1 if number == len(items) - 1 else int(dataset.indexed.sizes[item])
        pieces.append(SamplePiece(item, begin, end))
    return Origin(dataset.indexed.prefix, pieces)


def _ends(tokens: list[int]) -> list[list[int]]:
    """Return the first and the last tokens."""
    return [tokens[:_ENDS], tokens[-_ENDS:]]


def _range(config: RunConfig) -> tuple[int, int]:
    start, stop = config.extra["sample_id_range"]
    if not 0 <= start < stop:
        raise ConfigError(
            "the range of samples holds none",
            found=f"--sample-id-range {start} {stop}",
            fix="give the first sample (from 0) and the one after the last, as in "
            "--sample-id-range 0 10",
        )
    if config.extra["data_parallel_size"] < 1:
        raise ConfigError(
            "a run has at least one replica",
            found=f"--data-parallel-size {config.extra['data_parallel_size']}",
            fix="give the run's number of data-parallel ranks, or its --global-batch-size",
        )
    return start, stop


def _add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add = parser.add_argument_group("samples").add_argument
    add(
        "--sample-id-range",
        nargs=2,
        type=int,
        default=[0, 10],
        metavar=("START", "END"),
        help="samples from START up to, not including, END [0 10]",
    )
    add("--print-tokens", action="store_true", help="show token ids")
    add("--print-text", action="store_true", help="show text, which needs the tokenizer's files")
    add("--all-tokens", action="store_true", help="show all of them, not the first and last five")
    add("--output-file", help="write the lines to this file")
    add("--overwrite", action="store_true", help="replace an output file that exists")
    add(
        "--data-parallel-size",
        type=int,
        default=1,
        help="replicas of the run, which matter where it had no --global-batch-size [1]",
    )
    return parser


if __name__ == "__main__":
    run_program(main)
