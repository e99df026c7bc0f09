"""The jobs of `data.py` that megatron-core does, in its own Python: nothing of ours is imported.

Its package is also called `megatron`, so the two can never live in one process. `preprocess` is a
program of its own: the pip package has no tools/preprocess_data.py, so this does what that tool
does (a pool that parses and tokenizes line by line, one writer) with the package's own tokenizer
and IndexedDatasetBuilder.
"""

import argparse
import importlib.metadata
import json
import logging
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

from data_worker import Answer, Clock, digest_of, serve

_OPEN: dict[str, Any] = {}
_LINES_AT_A_TIME = 32  # as in Megatron-LM's tool


def versions() -> Answer:
    """Return the versions of the peers."""
    found: Answer = {}
    for name in ("megatron-core", "torch", "numpy", "transformers", "tokenizers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "python": sys.version.split()[0]}


def open_samples(name: str, prefix: str, cache: str, *, seq_length: int, seed: int) -> Answer:
    """Open a corpus as a GPTDataset of one epoch, with its mapped reader and without masks."""
    _dataset_imports()
    with Clock() as clock:
        _OPEN[name] = _dataset(prefix, cache, seq_length, seed)
    return clock.answer(samples=len(_OPEN[name]))


def read_samples(name: str, start: int, count: int, *, digest: bool = False) -> Answer:
    """Read samples from `start` on as training does; with `digest`, return their digest."""
    dataset = _OPEN[name]
    if digest:
        read = dataset._query_document_sample_shuffle_indices
        return {"digest": digest_of(read(i)[0] for i in range(start, start + count))}
    with Clock() as clock:
        for i in range(start, start + count):
            dataset[i]
    return clock.answer()


def read_tokens(name: str, start: int, count: int) -> Answer:
    """Read the tokens alone: neither tensors nor labels nor loss masks."""
    read = _OPEN[name]._query_document_sample_shuffle_indices
    with Clock() as clock:
        for i in range(start, start + count):
            read(i)
    return clock.answer()


def blending(weights: list[float], size: int, *, digest: bool = False) -> Answer:
    """Build the order of a blend, as BlendedDataset does."""
    import numpy as np
    from megatron.core.datasets import helpers
    from megatron.core.datasets.utils import normalize

    shares = normalize(weights)
    with Clock() as clock:
        chosen = np.zeros(size, np.int16)
        within = np.zeros(size, np.int64)
        helpers.build_blending_indices(chosen, within, shares, len(shares), size, False)
    return clock.answer(digest=digest_of([chosen, within]) if digest else None)


def load_sizes(sizes: str, documents: str) -> Answer:
    """Read the input of `sample_index` into memory."""
    import numpy as np

    _OPEN["sizes"] = (np.load(sizes), np.load(documents))
    return {"documents": len(_OPEN["sizes"][1])}


def sample_index(seq_length: int, tokens: int, *, digest: bool = False) -> Answer:
    """Build the index of samples over the documents that `load_sizes` read."""
    from megatron.core.datasets import helpers

    sizes, documents = _OPEN["sizes"]
    with Clock() as clock:
        rows = helpers.build_sample_idx(sizes, documents, seq_length, 1, tokens, True, True)
    return clock.answer(digest=digest_of([rows]) if digest else None)


def first_batch(
    started: float, prefix: str, cache: str, *, seq_length: int, seed: int, micro_batch: int
) -> Answer:
    """Return the time from process start to the first batch of a torch DataLoader."""
    import torch

    _dataset_imports()
    imported = time.time()
    with Clock() as clock:
        dataset = _dataset(prefix, cache, seq_length, seed)
        loader = torch.utils.data.DataLoader(dataset, batch_size=micro_batch, num_workers=0)
        batch = next(iter(loader))
    done = time.time()
    return clock.answer(
        imports=imported - started,
        whole=done - started,
        shape=list(batch["tokens"].shape),
    )


class _Tokenizer:
    """The tokenizer's attributes that a dataset reads; the corpus has its tokens already."""

    vocab_size = 50257
    eod = 50256
    pad = -1
    unique_identifiers = {"class": "none"}  # noqa: RUF012  # the peer reads an attribute


def _dataset_imports() -> None:
    import megatron.core.datasets.gpt_dataset
    import megatron.core.datasets.helpers  # noqa: F401


def _dataset(prefix: str, cache: str, seq_length: int, seed: int) -> Any:
    import numpy as np
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    logging.disable(logging.WARNING)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=cache,
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    corpus = GPTDataset.build_low_level_dataset(prefix, config)
    documents = np.arange(len(corpus), dtype=np.int32)
    samples = (int(corpus.sequence_lengths.sum(dtype=np.int64)) - 1) // seq_length
    return GPTDataset(corpus, prefix, documents, samples, Split.train, config)


def preprocess(words: list[str]) -> None:
    """Tokenize the key `text` of a .jsonl, with the tokenizer's token after each document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", required=True, help="folder that AutoTokenizer reads")
    parser.add_argument("--input", required=True)
    parser.add_argument("--output-prefix", required=True)
    parser.add_argument("--workers", type=int, required=True)
    args = parser.parse_args(words)
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    _prepare(args.tokenizer)
    pool = multiprocessing.Pool(args.workers, initializer=_prepare, initargs=(args.tokenizer,))
    dtype = DType.optimal_dtype(_OPEN["tokenizer"].vocab_size)
    builder = IndexedDatasetBuilder(f"{args.output_prefix}.bin", dtype=dtype)
    with open(args.input, encoding="utf-8") as lines:
        for ids in pool.imap(_encode, lines, _LINES_AT_A_TIME):
            builder.add_document(ids, [len(ids)])
    builder.finalize(f"{args.output_prefix}.idx")
    pool.close()
    pool.join()


def _prepare(folder: str) -> None:
    from megatron.core.tokenizers import MegatronTokenizer

    _OPEN["tokenizer"] = MegatronTokenizer.from_pretrained(
        folder, metadata_path={"library": "huggingface"}
    )


def _encode(line: str) -> list[int]:
    tokenizer = _OPEN["tokenizer"]
    ids: list[int] = tokenizer.tokenize(json.loads(line)["text"])
    return [*ids, tokenizer.eod] if ids else ids


JOBS = {
    job.__name__: job
    for job in (
        *(versions, open_samples, read_samples, read_tokens, blending, load_sizes),
        *(sample_index, first_batch),
    )
}

if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))  # its names are no packages of the peers
    if sys.argv[1:2] == ["preprocess"]:
        preprocess(sys.argv[2:])
    else:
        serve(JOBS)
