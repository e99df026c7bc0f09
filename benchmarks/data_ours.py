"""The jobs of `data.py` that our library does; each import stands in the job that needs it."""

import io
import json
import random
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.data_worker import Answer, Clock, digest_of, serve

_OPEN: dict[str, Any] = {}  # datasets and arrays by the name that the asking side gave them


def open_samples(
    name: str, prefix: str, cache: str, *, seq_length: int, seed: int, integrity: str, mapped: bool
) -> Answer:
    """Open a corpus as GPT samples of one epoch under `name`."""
    with Clock() as clock:
        _OPEN[name] = _dataset(prefix, cache, seq_length, seed, integrity, mapped)
    return clock.answer(samples=len(_OPEN[name]))


def read_samples(name: str, start: int, count: int, *, digest: bool = False) -> Answer:
    """Read samples from `start` on, one by one; with `digest`, return a digest of them."""
    dataset = _OPEN[name]
    if digest:
        return {"digest": digest_of(dataset[i]["text"] for i in range(start, start + count))}
    with Clock() as clock:
        for i in range(start, start + count):
            dataset[i]
    return clock.answer()


def open_memmap(name: str, prefix: str, *, seq_length: int, dtype: str) -> Answer:
    """Map the tokens alone: no index, no documents, no checks."""
    import numpy as np

    tokens = np.memmap(f"{prefix}.bin", dtype, "r")
    last = len(tokens) - seq_length - 1
    starts = random.Random(1).choices(range(last + 1), k=100_000)
    _OPEN[name] = (tokens, starts, seq_length + 1)
    return {"samples": len(starts)}


def read_memmap(name: str, start: int, count: int) -> Answer:
    """Copy `count` ranges from random places, as int64."""
    import numpy as np

    tokens, starts, length = _OPEN[name]
    places = [starts[i % len(starts)] for i in range(start, start + count)]
    with Clock() as clock:
        for place in places:
            tokens[place : place + length].astype(np.int64)
    return clock.answer()


def blending(weights: list[float], size: int, *, digest: bool = False) -> Answer:
    """Build the order of a blend."""
    from megatron.data.orders.sample_maps import build_blending_indices, compiled_is_used

    build_blending_indices(weights, 10)
    with Clock() as clock:
        found = build_blending_indices(weights, size)
    return clock.answer(
        compiled=compiled_is_used(),
        dtypes=[array.dtype.name for array in found],
        digest=digest_of(found) if digest else None,
    )


def load_sizes(sizes: str, documents: str) -> Answer:
    """Read the input of `sample_index` into memory."""
    import numpy as np

    _OPEN["sizes"] = (np.load(sizes), np.load(documents))
    return {"documents": len(_OPEN["sizes"][1])}


def sample_index(seq_length: int, tokens: int, *, digest: bool = False) -> Answer:
    """Build the index of samples over the documents that `load_sizes` read."""
    from megatron.data.orders.sample_maps import build_sample_idx, compiled_is_used

    sizes, documents = _OPEN["sizes"]
    with Clock() as clock:
        rows = build_sample_idx(
            sizes, documents, seq_length=seq_length, num_epochs=1, tokens_per_epoch=tokens
        )
    return clock.answer(compiled=compiled_is_used(), digest=digest_of([rows]) if digest else None)


def first_batch(
    started: float, prefix: str, cache: str, *, seq_length: int, seed: int, micro_batch: int
) -> Answer:
    """Return the time from process start to the first batch; `started` is the clock before."""
    from megatron.data.loading.loaders import build_data_loader

    _dataset_imports()
    imported = time.time()
    with Clock() as clock:
        dataset = _dataset(prefix, cache, seq_length, seed, "touched", False)
        loader = build_data_loader(
            dataset,
            consumed_samples=0,
            micro_batch_size=micro_batch,
            data_parallel_rank=0,
            data_parallel_size=1,
            num_workers=0,
        )
        batch = next(iter(loader))
    done = time.time()
    return clock.answer(
        imports=imported - started,
        whole=done - started,
        shape=list(batch["text"].shape),
    )


def tool(words: list[str]) -> Answer:
    """Run tools/preprocess_data.py in this process, after all imports."""
    from tools import preprocess_data

    with redirect_stdout(io.StringIO()), Clock() as clock:
        preprocess_data.main(words)
    return clock.answer()


def bare_tokenizers(path: str, documents: str, *, batch: int) -> Answer:
    """Return an encoder by `tokenizers` alone: tokenizer.json, encode_batch, ids as lists."""
    import tokenizers

    texts = _texts(documents)
    tokens = 0
    with Clock() as clock:
        core = tokenizers.Tokenizer.from_file(path)
        core.no_truncation()
        core.no_padding()
        for start in range(0, len(texts), batch):
            found = core.encode_batch(texts[start : start + batch], add_special_tokens=False)
            tokens += sum(len(encoding.ids) for encoding in found)
    return clock.answer(tokens=tokens)


def bare_tiktoken(vocab_file: str, merge_file: str, documents: str) -> Answer:
    """Return an encoder by `tiktoken` alone, with a GPT-2 vocabulary."""
    import tiktoken

    from megatron.tokenizer.huggingface import byte_symbols

    byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    vocab = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
    lines = Path(merge_file).read_text(encoding="utf-8").splitlines()
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    pieces = [*byte_symbols(), *("".join(pair) for pair in merges)]
    ranks = {bytes(byte_of[s] for s in piece): rank for rank, piece in enumerate(pieces)}
    assert len(ranks) <= len(vocab)  # noqa: S101  # invariant: every piece has an id
    encoding = tiktoken.Encoding(
        "bare",
        pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        mergeable_ranks=ranks,
        special_tokens={},
    )
    texts = _texts(documents)
    with Clock() as clock:
        tokens = sum(len(encoding.encode_ordinary(text)) for text in texts)
    return clock.answer(tokens=tokens)


def _dataset_imports() -> Any:
    from megatron.config.data import DataIntegrity
    from megatron.data.gpt_dataset import GPTDataset
    from megatron.data.indexed_dataset import MMapIndexedDataset
    from megatron.data.orders.index_cache import IndexCache

    return DataIntegrity, GPTDataset, IndexCache, MMapIndexedDataset


def _dataset(
    prefix: str, cache: str, seq_length: int, seed: int, integrity: str, mapped: bool
) -> Any:
    import numpy as np

    data_integrity, gpt_dataset, index_cache, indexed_dataset = _dataset_imports()
    corpus = indexed_dataset(prefix, integrity=data_integrity(integrity), mapped=mapped)
    return gpt_dataset(
        corpus,
        name="train",
        documents=np.arange(len(corpus), dtype=np.int32),
        num_samples=(corpus.num_tokens - 1) // seq_length,
        seq_length=seq_length,
        seed=seed,
        cache=index_cache(folders=(Path(cache),)),
    )


def _texts(path: str) -> list[str]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


JOBS = {
    job.__name__: job
    for job in (
        *(open_samples, read_samples, open_memmap, read_memmap, blending, load_sizes),
        *(sample_index, first_batch, tool, bare_tokenizers, bare_tiktoken),
    )
}

if __name__ == "__main__":
    serve(JOBS)
