"""Whatever the number of ranks, workers and stops: all ranks together see one order of samples."""

import multiprocessing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.blendable_dataset import BlendableDataset
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.loading.loaders import build_data_loader
from tests.support.examples import examples
from tests.unit.data.corpora import cache_in, open_corpus, random_sizes, write_corpus

pytestmark = pytest.mark.slow

KINDS = ("single", "cyclic")


class Numbers:
    """Sample i holds i."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"text": np.full(3, index, np.int64)}

    def fingerprint(self):
        return "numbers"

    def check_unchanged(self):
        pass


def seen_by_all(dataset, kind, *, ranks, size, consumed=0, steps=None, workers=0, seed=1234):
    """First tokens of the samples of each step, rank by rank, up to the end of one iteration."""
    loaders = [
        build_data_loader(
            dataset,
            consumed_samples=consumed,
            micro_batch_size=size,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            num_workers=workers,
            kind=kind,
            seed=seed,
        )
        for rank in range(ranks)
    ]
    taken = []
    for number, step in enumerate(zip(*loaders)):
        if number == steps:
            break
        taken += [row for batch in step for row in batch["text"].tolist()]
    return taken


def numbers_of(rows):
    return [row[0] for row in rows]


@examples(100)
@given(
    st.sampled_from(KINDS),
    st.integers(4, 60),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
    st.integers(0, 150),
)
def test_data_parallel_sizes_see_the_same_global_order(kind, total, size, seed, consumed):
    consumed = consumed if kind == "cyclic" else consumed % (total + 1)
    dataset = Numbers(total)
    orders = {
        ranks: numbers_of(
            seen_by_all(dataset, kind, ranks=ranks, size=size, consumed=consumed, seed=seed)
        )
        for ranks in (1, 2, 4)
        if size * ranks <= total
    }
    longest = max(orders.values(), key=len)
    for ranks, order in orders.items():
        assert order == longest[: len(order)]
        assert len(order) % (ranks * size) == 0
    left = total - consumed % total if kind == "cyclic" else total - consumed
    for ranks, order in orders.items():
        if kind == "single":
            assert left - ranks * size < len(order) <= left
        else:
            assert left <= len(order) < left + ranks * size
            assert sorted({*order[:left]}) == sorted(order[:left]), "no sample twice in an epoch"


@examples(150)
@given(
    st.sampled_from(KINDS),
    st.integers(6, 60),
    st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 3), st.integers(0, 6)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**32 - 1),
)
def test_a_run_stopped_anywhere_and_resumed_at_other_sizes_repeats_and_misses_nothing(
    kind, total, legs, seed
):
    """Each leg of a run has a number of ranks, a micro-batch size and a number of steps."""
    dataset, consumed, seen = Numbers(total), 0, []
    for ranks, size, steps in [*legs, (1, 1, total)]:
        left = total - consumed
        if ranks * size > total or steps * ranks * size > left:
            continue
        rows = seen_by_all(
            dataset, kind, ranks=ranks, size=size, consumed=consumed, steps=steps, seed=seed
        )
        assert len(rows) == steps * ranks * size
        seen += numbers_of(rows)
        consumed += len(rows)
    rest = seen_by_all(dataset, kind, ranks=1, size=1, consumed=consumed, seed=seed)
    if kind == "single" or consumed < total:
        seen += numbers_of(rest)
    assert sorted(seen) == list(range(total)), "every sample of the epoch once"
    assert seen == numbers_of(seen_by_all(dataset, kind, ranks=1, size=1, seed=seed))


@pytest.mark.parametrize("kind", KINDS)
def test_worker_processes_over_a_corpus_give_the_same_order_as_one_process(tmp_path, kind):
    """Also where a run of two ranks is taken over by four and one, in the midst of an epoch."""
    corpus = open_corpus(tmp_path, random_sizes(60, seed=2))
    dataset = GPTDataset(
        corpus,
        name="train",
        documents=np.arange(len(corpus)),
        num_samples=48,
        seq_length=16,
        seed=7,
        cache=cache_in(tmp_path),
    )
    whole = seen_by_all(dataset, kind, ranks=1, size=1)
    assert len(whole) == len(dataset)
    first = seen_by_all(dataset, kind, ranks=2, size=3, steps=3, workers=2)
    second = seen_by_all(dataset, kind, ranks=4, size=2, consumed=18, steps=2, workers=1)
    last = seen_by_all(dataset, kind, ranks=1, size=1, consumed=34, workers=1)
    assert first + second + last == whole


def read_elsewhere(datasets, indices, answer):
    answer.put([[dataset[index]["text"].tolist() for index in indices] for dataset in datasets])


def test_a_spawned_process_reads_the_same_samples(tmp_path):
    """Datasets travel as paths: no descriptor and no mapping of this process is needed there."""
    blends = [blend_of_two(tmp_path / str(mapped), mapped=mapped) for mapped in (False, True)]
    processes = multiprocessing.get_context("spawn")
    answer = processes.Queue()
    indices = list(range(len(blends[0])))
    process = processes.Process(target=read_elsewhere, args=(blends, indices, answer), daemon=True)
    process.start()
    expected = [[blend[index]["text"].tolist() for index in indices] for blend in blends]
    assert answer.get(timeout=60) == expected
    process.join(60)
    assert process.exitcode == 0


def blend_of_two(tmp_path, *, mapped):
    """Return samples of two corpora whose files are mapped or not."""
    tmp_path.mkdir()
    datasets = []
    for name, sizes in (("a", random_sizes(40, seed=3)), ("b", random_sizes(30, seed=4))):
        corpus = MMapIndexedDataset(write_corpus(tmp_path / name, sizes), mapped=mapped)
        datasets.append(
            GPTDataset(
                corpus,
                name=name,
                documents=np.arange(len(corpus)),
                num_samples=20,
                seq_length=8,
                seed=7,
                cache=cache_in(tmp_path),
            )
        )
    return BlendableDataset(datasets, [1, 2], num_samples=25)
