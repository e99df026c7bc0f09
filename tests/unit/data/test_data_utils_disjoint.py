"""Training, validation and test share no token, whatever the split, the blend and the order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.data_utils import (
    SPLITS,
    IndexPlace,
    build_train_valid_test_datasets,
    split_ranges,
)
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from megatron.data.kinds.dataset_makers import Windows
from tests.support.examples import examples

BIG = 100_000  # tokens of one corpus are numbered from its multiple on


def numbered(folder, number, sizes):
    """A corpus of which every token is its own number, so that it differs from all others."""
    prefix = folder / f"c{number}"
    with MMapIndexedDatasetBuilder(prefix, np.int32) as builder:
        for stop, size in zip(np.cumsum(sizes), sizes):
            builder.add_document(number * BIG + np.arange(stop - size, stop))
    return str(prefix)


@examples(30)
@given(
    st.lists(st.lists(st.integers(1, 12), min_size=4, max_size=12), min_size=1, max_size=3),
    st.tuples(st.integers(1, 90), st.integers(1, 90), st.integers(1, 90)),
    st.integers(1, 6),
    st.integers(0, 2**32 - 1),
)
def test_splits_share_no_token_and_read_only_documents_of_their_own(
    tmp_path_factory, corpora, shares, seq_length, seed
):
    folder = tmp_path_factory.mktemp("disjoint")
    split = ",".join(map(str, shares))
    borders = [split_ranges(split, len(sizes)) for sizes in corpora]
    prefixes = [numbered(folder, number, sizes) for number, sizes in enumerate(corpora)]
    used = tuple(all(b[k] < b[k + 1] for b in borders) for k in range(3))
    path = prefixes[:1]
    if len(prefixes) > 1:
        path = [word for prefix in prefixes for word in ("1", prefix)]
    datasets = build_train_valid_test_datasets(
        Windows(open_corpus=MMapIndexedDataset, seq_length=seq_length, seed=seed),
        data_path=path,
        split=split,
        num_samples=tuple(15 * is_used for is_used in used),
        place=IndexPlace(cache_path=str(folder / "cache")),
    )
    seen = []
    for number, (name, dataset) in enumerate(zip(SPLITS, datasets)):
        assert (dataset is None) == (not used[number]), name
        samples = range(len(dataset) if dataset is not None else 0)
        seen.append({token for i in samples for token in dataset[i]["text"].tolist()})
        allowed = {
            at * BIG + token
            for at, (sizes, border) in enumerate(zip(corpora, borders))
            for token in range(sum(sizes[: border[number]]), sum(sizes[: border[number + 1]]))
        }
        assert seen[-1] <= allowed
    assert not seen[0] & seen[1]
    assert not seen[0] & seen[2]
    assert not seen[1] & seen[2]
