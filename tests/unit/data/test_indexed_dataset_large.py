"""Tokens beyond 2 and 4 GiB are found, in a file of holes that takes no room on the disk."""

from pathlib import Path

import numpy as np
import pytest
import xxhash

from megatron.config.data import DataIntegrity
from megatron.data.corpus.checksums import (
    BLOCK_BYTES,
    CorpusChecksums,
    IndexHasher,
    write_checksums,
)
from megatron.data.corpus.index_file import write_index
from megatron.data.corpus.paths import checksum_file_path
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import MMapIndexedDataset, data_file_path, index_file_path
from megatron.errors import DataError
from tests.unit.data.corpora import cache_in

U16 = np.dtype("<u2")
SIZES = [2**30 - 3, 8, 2**30 - 9, 2**20, 40]  # tokens of 2 bytes: the ends lie at 2 and 4 GiB
ENDS = np.cumsum(SIZES).tolist()
MARKED = [0, ENDS[0] - 2, ENDS[1] + 1, 2**31 - 3, 2**31 + 30, ENDS[4] - 9]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Zeros, but for eight tokens from each place of MARKED on; with true checksums."""
    prefix = str(tmp_path_factory.mktemp("large") / "c")
    hasher = IndexHasher()
    with open(index_file_path(prefix), "wb") as file:
        hasher = IndexHasher(file)
        sizes, documents = np.array(SIZES, np.int32), np.arange(len(SIZES) + 1)
        write_index(hasher, U16, sizes, documents)
    total = 2 * ENDS[-1]
    with open(data_file_path(prefix), "wb") as file:
        file.truncate(total)
        for token in MARKED:
            file.seek(2 * token)
            file.write(expected_at(token).tobytes())
    assert Path(data_file_path(prefix)).stat().st_blocks * 512 < 2**24, "holes take no room"
    blocks = np.full(-(-total // BLOCK_BYTES), xxhash.xxh3_64_intdigest(bytes(BLOCK_BYTES)), "<u8")
    touched = {2 * token // BLOCK_BYTES for at in MARKED for token in (at, at + 7)}
    with open(data_file_path(prefix), "rb") as file:
        for block in touched | {len(blocks) - 1}:
            file.seek(block * BLOCK_BYTES)
            blocks[block] = xxhash.xxh3_64_intdigest(file.read(BLOCK_BYTES))
    checksums = CorpusChecksums(BLOCK_BYTES, total, hasher.total_bytes, hasher.digest(), blocks)
    write_checksums(Path(checksum_file_path(prefix)), checksums)
    return prefix


def expected_at(token):
    return (np.arange(8) + token % 60000 + 1).astype(U16)


@pytest.mark.parametrize("mapped", [False, True])
def test_tokens_beyond_32_bits_are_the_right_ones(prefix, mapped):
    corpus = MMapIndexedDataset(prefix, mapped=mapped)
    assert corpus.num_tokens == ENDS[-1] > 2**31
    assert max(MARKED) * 2 > 2**32
    for token in MARKED:
        item = int(np.searchsorted(ENDS, token, side="right"))
        offset = token - (ENDS[item - 1] if item else 0)
        count = min(8, SIZES[item] - offset)
        assert corpus.get(item, offset, count).tolist() == expected_at(token)[:count].tolist()
        if offset >= 4:
            assert corpus.get(item, offset - 4, 4).tolist() == [0, 0, 0, 0]


def test_damage_beyond_four_gibibytes_is_named_by_its_byte(prefix):
    at = 2 * (ENDS[4] - 9)
    with open(data_file_path(prefix), "r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    corpus = MMapIndexedDataset(prefix)
    corpus.get(3, 0, 8)
    with pytest.raises(DataError, match="not those that were written") as raised:
        corpus.get(4)
    block = at // BLOCK_BYTES * BLOCK_BYTES
    assert block > 2**32
    assert f"bytes [{block}, {2 * ENDS[-1]})" in str(raised.value)
    with open(data_file_path(prefix), "r+b") as file:
        file.seek(at)
        file.write(expected_at(ENDS[4] - 9).tobytes())


def test_samples_that_lie_beyond_two_gibitokens_are_windows_of_the_stream(prefix, tmp_path):
    corpus = MMapIndexedDataset(prefix, integrity=DataIntegrity.HEADER)
    seq_length = 2**20
    dataset = GPTDataset(
        corpus,
        name="train",
        documents=np.arange(len(SIZES)),
        num_samples=2**12,
        seq_length=seq_length,
        seed=3,
        cache=cache_in(tmp_path),
    )
    assert len(dataset) * seq_length > 2**32 - seq_length
    order = np.load(dataset.index_files["doc_idx"]).tolist()
    place = np.argsort(np.load(dataset.index_files["shuffle_idx"]))
    starts = np.cumsum([0, *(SIZES[document] for document in order)]).tolist()
    checked = []
    for document, start in zip(order, starts):
        first = ENDS[document] - SIZES[document]
        for token in (token for token in MARKED if first <= token < ENDS[document]):
            row, offset = divmod(start + token - first, seq_length)
            if row < len(dataset):
                text = dataset[place[row]]["text"]
                assert text[offset] == expected_at(token)[0]
                checked.append(start + token - first)
    assert max(checked) > 2**31
