"""Every token of a split is seen once per epoch, and a cached order is the one built anew."""

import itertools
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.gpt_dataset import GPTDataset, build_gpt_indices
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from tests.support.examples import examples
from tests.unit.data.corpora import cache_in

KEYS = ("doc_idx", "sample_idx", "shuffle_idx")


@st.composite
def splits(draw):
    """Sizes of a corpus, the documents of it that a split has, and how they are read."""
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=10).filter(any))
    first = draw(st.integers(0, len(sizes) - 1))
    stop = draw(st.integers(first + 1, len(sizes)))
    if not any(sizes[first:stop]):
        first, stop = 0, len(sizes)
    return {
        "sizes": sizes,
        "documents": np.arange(first, stop),
        "num_samples": draw(st.integers(1, 40)),
        "seq_length": draw(st.integers(1, 9)),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "last_epoch_cutoff": draw(st.sampled_from([0.95, 0.8])),
    }


def numbered(folder, sizes):
    """A corpus of which every token is its own number, so that each differs from all others."""
    with MMapIndexedDatasetBuilder(folder / "numbered", np.int32) as builder:
        for stop, size in zip(np.cumsum(sizes), sizes):
            builder.add_document(np.arange(stop - size, stop))
    return MMapIndexedDataset(folder / "numbered")


def dataset_of(folder, split, **changes):
    options = {key: value for key, value in split.items() if key != "sizes"}
    options |= {"name": "train", "cache": cache_in(folder)}
    return GPTDataset(numbered(folder, split["sizes"]), **(options | changes))


@examples(40)
@given(splits())
def test_every_token_of_a_split_is_predicted_once_per_epoch(tmp_path_factory, split):
    """By the items themselves: the inputs of all samples end to end, in the order of the stream."""
    dataset = dataset_of(tmp_path_factory.mktemp("once"), split)
    ends = np.cumsum(split["sizes"])
    held = [token for d in split["documents"] for token in range(*_range(ends, split["sizes"], d))]
    epochs, length = dataset.plan.num_epochs, split["seq_length"]
    in_order = np.argsort(np.load(dataset.index_files["shuffle_idx"]))
    rows = [dataset[place]["text"] for place in in_order.tolist()]
    for one, other in itertools.pairwise(rows):
        assert one[-1] == other[0], "the last label is the first input of the next sample"
    stream = np.concatenate([*(row[:-1] for row in rows), rows[-1][-1:]]).tolist()
    assert len(stream) == len(rows) * length + 1
    left = epochs * len(held) - len(stream)
    assert 0 <= left < length, "what does not fill a sample, once per dataset and not per epoch"
    counts = np.bincount(stream, minlength=ends[-1])
    assert set(np.flatnonzero(counts)) <= set(held), "no token of another split"
    missing = epochs - counts[held]
    assert (missing >= 0).all(), "no token more often than there are epochs"
    assert missing.sum() == left
    # Within a document tokens follow each other, and a document ends where the next one begins.
    last_tokens = {end - 1 for end, size in zip(ends.tolist(), split["sizes"]) if size}
    first_tokens = {end - size for end, size in zip(ends.tolist(), split["sizes"]) if size}
    for one, other in itertools.pairwise(stream):
        assert other == one + 1 or (one in last_tokens and other in first_tokens)


@examples(40)
@given(splits())
def test_an_epoch_apart_has_every_token_once_and_those_before_it_no_more_than_their_number(
    tmp_path_factory, split
):
    """Samples that come first are those of the first epochs, when the last is shuffled apart."""
    dataset = dataset_of(tmp_path_factory.mktemp("apart"), split)
    plan = dataset.plan
    first = [dataset[i]["text"][:-1] for i in range(plan.shuffled_apart_from)]
    counts = np.bincount(np.concatenate([*first, np.empty(0, np.int64)]))
    before_last = plan.num_epochs - int(plan.last_epoch_is_separate)
    assert counts.max(initial=0) <= before_last
    doc_idx = np.load(dataset.index_files["doc_idx"])
    if plan.last_epoch_is_separate:
        last = doc_idx[-len(split["documents"]) :]
        assert sorted(last.tolist()) == split["documents"].tolist()
    else:
        assert plan.shuffled_apart_from == len(dataset)
    per_document = np.bincount(doc_idx)[split["documents"]]
    assert (per_document == plan.num_epochs).all()


@examples(20)
@given(splits())
def test_a_cache_hit_equals_a_rebuild(tmp_path_factory, split):
    """To the byte: loaded, built in another place, and computed without any cache."""
    folder, elsewhere = tmp_path_factory.mktemp("hit"), tmp_path_factory.mktemp("rebuilt")
    built = dataset_of(folder, split)
    before = dict(built.index_files)
    contents = {key: Path(path).read_bytes() for key, path in before.items()}
    loaded = dataset_of(folder, split)
    assert loaded.index_files == before
    rebuilt = dataset_of(folder, split, cache=cache_in(elsewhere))
    options = {key: split[key] for key in ("documents", "seq_length", "seed")}
    computed = build_gpt_indices(
        built.indexed.sizes, options.pop("documents").astype(np.int32), plan=built.plan, **options
    )
    for key in KEYS:
        assert Path(rebuilt.index_files[key]).read_bytes() == contents[key]
        array = np.load(before[key])
        assert array.dtype == computed[key].dtype
        assert array.tobytes() == computed[key].tobytes()
    assert loaded.fingerprint() == rebuilt.fingerprint() == built.fingerprint()
    assert len(loaded) == len(built)
    for i in range(len(built)):
        assert loaded[i]["text"].tolist() == rebuilt[i]["text"].tolist()


def _range(ends, sizes, document):
    return ends[document] - sizes[document], ends[document]
