"""Rows are the documents of the split, whole, in the order of a naive packer."""

import pickle
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron import log
from megatron.config.data import OnTooLong
from megatron.data.data_utils import DocumentSlice
from megatron.data.samples.packing import PackedDataset, PackedDocument, build_packed_indices
from megatron.errors import DataError
from tests.support.examples import examples
from tests.unit.data.corpora import cache_in

PAD = 9


class Source:
    """Documents of given lengths, half input; token k of document d is 1000 d + k + 10."""

    prefix = "some/corpus"

    def __init__(self, lengths):
        self.lengths: npt.NDArray[np.int64] = np.array(lengths, np.int64)
        self.missing = 0
        self.checked = 0

    def document(self, number):
        size = int(self.lengths[number]) - self.missing
        return PackedDocument(
            1000 * number + np.arange(size) + 10, np.arange(size) < self.inputs(number)
        )

    def inputs(self, number):
        return int(self.lengths[number]) // 2

    def fingerprint(self):
        return " ".join(map(str, self.lengths))

    def check_unchanged(self):
        self.checked += 1


def make(lengths, folder, **changes):
    source = Source(lengths)
    options = {
        "documents": DocumentSlice(name="train", start=0, stop=len(lengths)),
        "num_samples": 5,
        "seq_length": 19,
        "seed": 1234,
        "pad": PAD,
        "cache": cache_in(folder),
    }
    return PackedDataset(source, **(options | changes))


def naive_rows(lengths, num_samples, row_length, seed):
    """The recipe of docs/data.md with lists of documents in place of ranges."""
    rng = np.random.RandomState(seed)
    rows, row, order = [], [], []
    while len(rows) <= num_samples:
        epoch = np.arange(len(lengths))
        rng.shuffle(epoch)
        order += epoch.tolist()
        for document in epoch.tolist():
            if sum(lengths[d] for d in row) + lengths[document] > row_length:
                if row:
                    rows.append(row)
                row = []
            if lengths[document] <= row_length:
                row = [*row, document]
    return rows, order


@examples(150)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12).filter(lambda s: min(s) <= 20),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)
def test_the_order_is_that_of_a_naive_packer(lengths, num_samples, seed):
    index = build_packed_indices(
        np.array(lengths),
        np.arange(100, 100 + len(lengths)),
        num_samples=num_samples,
        row_length=20,
        seed=seed,
    )
    rows, order = naive_rows(lengths, num_samples, 20, seed)
    assert index["sample_idx"].dtype == index["shuffle_idx"].dtype == np.int64
    assert (index["shuffle_idx"] - 100).tolist() == order
    assert [(index["shuffle_idx"][a:b] - 100).tolist() for a, b in index["sample_idx"]] == rows
    assert len(rows) > num_samples


def test_the_order_of_one_corpus_stays_the_same_for_ever():
    lengths = np.array([5, 9, 3, 12, 7, 30, 2, 11, 8, 4])
    index = build_packed_indices(lengths, np.arange(10), num_samples=4, row_length=20, seed=1234)
    # What Megatron-DeepSpeed's packing gives; document 5 is too long for a row.
    assert index["shuffle_idx"].reshape(2, 10).tolist() == [
        [7, 2, 9, 1, 0, 8, 4, 5, 6, 3],
        [7, 3, 5, 1, 4, 8, 0, 2, 6, 9],
    ]
    assert index["sample_idx"].ravel().tolist() == [
        0, 3, 3, 5, 5, 7, 8, 10, 10, 11, 11, 12, 13, 15, 15, 19,
    ]  # fmt: skip


@examples(25)
@given(
    st.lists(st.integers(1, 25), min_size=2, max_size=10).filter(lambda s: min(s) <= 20),
    st.integers(0, 1000),
    st.sampled_from([OnTooLong.SKIP, OnTooLong.CUT]),
)
def test_every_row_is_whole_documents_and_padding(tmp_path_factory, lengths, seed, policy):
    folder = tmp_path_factory.mktemp("rows")
    dataset = make(lengths, folder, seed=seed, on_too_long=policy)
    kept = [min(n, 20) if policy is OnTooLong.CUT else n for n in lengths]
    rows, _ = naive_rows(kept, 5, 20, seed)
    assert len(dataset) == len(rows)
    for index, row in enumerate(rows):
        text, segments, inputs = [], [], []
        for segment, document in enumerate(row, 1):
            text += [1000 * document + k + 10 for k in range(kept[document])]
            segments += [segment] * kept[document]
            inputs += [int(k < lengths[document] // 2) for k in range(kept[document])]
        padding = 20 - len(text)
        sample = dataset[index]
        assert sample["text"].tolist() == text + [PAD] * padding
        assert sample["segment_ids"].tolist() == segments + [0] * padding
        assert sample["is_input"].tolist() == inputs + [0] * padding
        assert {array.dtype for array in sample.values()} == {np.dtype(np.int64)}


@examples(60)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=10), st.integers(0, 1000), st.integers(1, 60)
)
def test_every_document_is_seen_once_per_epoch(lengths, seed, num_samples):
    index = build_packed_indices(
        np.array(lengths),
        np.arange(len(lengths)),
        num_samples=num_samples,
        row_length=20,
        seed=seed,
    )
    rows = index["sample_idx"]
    assert rows[0, 0] == 0
    assert (rows[1:, 0] == rows[:-1, 1]).all()  # nothing is left out when everything fits
    epochs = index["shuffle_idx"].reshape(-1, len(lengths))
    assert (np.sort(epochs, axis=1) == np.arange(len(lengths))).all()
    seen = Counter(index["shuffle_idx"][: rows[-1, 1]].tolist())
    assert max(seen.values()) - min(seen.get(d, 0) for d in range(len(lengths))) <= 1


def test_a_split_has_the_documents_of_its_own_range(tmp_path):
    lengths = [6] * 30
    for name, documents in (("train", range(20)), ("valid", range(20, 30))):
        dataset = make(
            lengths,
            tmp_path,
            documents=DocumentSlice(name=name, start=documents.start, stop=documents.stop),
        )
        tokens = np.concatenate([dataset[i]["text"] for i in range(len(dataset))])
        assert set((tokens[tokens != PAD] // 1000).tolist()) <= set(documents)


def test_another_length_range_or_policy_is_another_entry_of_the_cache(tmp_path):
    lengths = [6, 5, 9, 7, 8, 12, 25]
    changes = [
        {},
        {"seq_length": 23},
        {"documents": DocumentSlice(name="train", start=0, stop=3)},
        {"documents": DocumentSlice(name="train", start=3, stop=6)},
        {"seed": 1},
        {"num_samples": 6},
        {"on_too_long": OnTooLong.CUT},
    ]
    datasets = [make(lengths, tmp_path, **change) for change in changes]
    assert len({dataset.fingerprint() for dataset in datasets}) == len(changes)
    assert len({dataset.index_files["sample_idx"] for dataset in datasets}) == len(changes)
    again = make(lengths, tmp_path)
    assert again.index_files == datasets[0].index_files
    assert again.fingerprint() == datasets[0].fingerprint()


def test_a_cached_order_is_read_and_not_built_again(tmp_path, monkeypatch):
    first = make([6, 5, 9], tmp_path)

    def never(*args, **options):
        raise AssertionError("it was built again")

    monkeypatch.setattr("megatron.data.samples.packing.build_packed_indices", never)
    second = make([6, 5, 9], tmp_path)
    assert [second[i]["text"].tolist() for i in range(len(second))] == [
        first[i]["text"].tolist() for i in range(len(first))
    ]


def test_a_dataset_travels_to_a_worker(tmp_path):
    dataset = make([6, 5, 9], tmp_path)
    other = pickle.loads(pickle.dumps(dataset))
    assert other.fingerprint() == dataset.fingerprint()
    assert other[2]["text"].tolist() == dataset[2]["text"].tolist()


def test_no_index_counts_from_the_end(tmp_path):
    dataset = make([6, 5, 9], tmp_path)
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError, match="sample"):
            dataset[index]


def test_a_touched_corpus_is_found_through_it(tmp_path):
    dataset = make([6, 5, 9], tmp_path)
    dataset.check_unchanged()
    assert dataset.source.checked == 1


def test_too_long_documents_are_counted_and_said(tmp_path, capsys):
    log.configure(0, 1)
    make([6, 21, 9, 40], tmp_path)
    output = capsys.readouterr().err
    assert "left out: 2 of 4, the longest with 40 tokens; a row holds 20" in output
    make([6, 21, 9, 40], tmp_path, on_too_long=OnTooLong.CUT)
    assert "cut to it: 2 of 4" in capsys.readouterr().err
    make([6, 20, 9], tmp_path)
    assert capsys.readouterr().err == ""


def test_too_long_documents_can_be_refused_with_a_length_that_works(tmp_path):
    with pytest.raises(DataError, match="longer than a row") as raised:
        make([6, 21, 40], tmp_path, on_too_long=OnTooLong.ERROR)
    assert "2 of 3, the longest with 40 tokens" in str(raised.value)
    assert "--seq-length 39 or more" in raised.value.fix
    make([6, 21, 40], tmp_path, on_too_long=OnTooLong.ERROR, seq_length=39)


def test_a_policy_may_be_given_by_its_name(tmp_path):
    assert make([6, 21], tmp_path, on_too_long="cut").fingerprint() == (
        make([6, 21], tmp_path, on_too_long=OnTooLong.CUT).fingerprint()
    )
    with pytest.raises(ValueError, match="'shorten' is not a valid OnTooLong"):
        make([6, 21], tmp_path, on_too_long="shorten")


def test_nothing_but_too_long_documents_is_an_error_at_once(tmp_path):
    with pytest.raises(DataError, match="every document of the train split") as raised:
        make([21, 40], tmp_path)
    assert "--seq-length 20 or more" in raised.value.fix
    assert len(make([21, 40], tmp_path, seq_length=20)) > 5
    with pytest.raises(ValueError, match="no row would fill"):
        build_packed_indices(np.array([3]), np.arange(1), num_samples=1, row_length=2, seed=0)


@pytest.mark.parametrize("lengths", [[0, 0], [0, 50]])
def test_documents_without_tokens_fill_no_row(lengths, tmp_path):
    with pytest.raises(DataError, match="has no tokens to fill a row with"):
        make(lengths, tmp_path)


def test_an_empty_split_is_refused(tmp_path):
    with pytest.raises(DataError, match="split of some/corpus is empty"):
        make([3], tmp_path, documents=DocumentSlice(name="train", start=0, stop=0))


def test_documents_outside_of_the_corpus_and_silly_sizes_are_bugs(tmp_path):
    with pytest.raises(ValueError, match=r"documents 0\.\.1 of 1"):
        make([3], tmp_path, documents=DocumentSlice(name="train", start=0, stop=2))
    with pytest.raises(ValueError, match="1 or more"):
        make([3], tmp_path, num_samples=0)


def test_a_document_shorter_than_its_index_says_is_refused(tmp_path):
    dataset = make([6, 5, 9], tmp_path)
    dataset.source.missing = 1
    with pytest.raises(DataError, match="is not what its index says"):
        dataset[0]


def test_passes_over_the_documents_are_counted_in_documents(tmp_path):
    dataset = make([10, 10, 10, 10], tmp_path, num_samples=5)  # two in a row of 20
    assert [dataset.epochs(rows) for rows in (0, 1, 2, 5)] == [0, 0.5, 1, 2.5]
