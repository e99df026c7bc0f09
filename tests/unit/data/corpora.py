"""Synthetic corpora made on the spot, and real ones where the machine has them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.data.corpus.metadata import CorpusMetadata
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from megatron.data.orders.index_cache import IndexCache
from tests.conftest import optional_data_folder

METADATA = CorpusMetadata(tokenizer_type="GPT2BPETokenizer", vocab_size=5000, eod=4999)


def write_corpus(prefix: Path, sizes: Sequence[int], *, dtype: type = np.uint16, **options) -> str:
    """A corpus of one item per size, whose token k is k modulo 5000; returns the prefix."""
    start = 0
    with MMapIndexedDatasetBuilder(prefix, dtype, **options) as builder:
        for size in sizes:
            builder.add_document(np.arange(start, start + size) % 5000)
            start += size
    return str(prefix)


def random_sizes(count: int, *, seed: int = 0, most: int = 60) -> list[int]:
    """Sizes that stay the same for ever: RandomState's stream is frozen."""
    return np.random.RandomState(seed).randint(0, most, count).tolist()


def open_corpus(folder: Path, sizes: Sequence[int]) -> MMapIndexedDataset:
    """A corpus of these sizes, written and opened."""
    return MMapIndexedDataset(write_corpus(folder / "corpus", sizes))


def cache_in(folder: Path, **options) -> IndexCache:
    """A cache of one folder."""
    return IndexCache(folders=(folder / "index-cache",), **options)


def real_gpt2_corpora() -> list[str]:
    """The prefix of the 1000-document reference corpus in a list, or an empty list without it."""
    folder = optional_data_folder()
    if folder is None:
        return []
    prefix = str(folder / "megatron_mmap" / "meg-gpt2-openwebtext_text_document")
    return [prefix] if MMapIndexedDataset.exists(prefix) else []


DOCUMENTS = [[1, 2, 3], [], [65499], [4, 5]]


def write_documents(prefix: Path) -> str:
    """The corpus DOCUMENTS under `prefix`, which is returned."""
    with MMapIndexedDatasetBuilder(prefix, np.uint16) as builder:
        for document in DOCUMENTS:
            builder.add_document(document)
    return str(prefix)


def flip(path: str | Path, at: int, bits: int = 1) -> None:
    """Change `bits` of the byte at `at` of a file."""
    content = bytearray(Path(path).read_bytes())
    content[at] ^= bits
    Path(path).write_bytes(content)
