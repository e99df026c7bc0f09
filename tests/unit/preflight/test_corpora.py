"""Checks share the corpora that they open, by kind of dataset and flags."""

from collections import Counter
from pathlib import Path

import pytest

from megatron.config.data import DataIntegrity
from megatron.data.data_utils import Corpus
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.errors import DataError
from megatron.preflight.checks import CHECKS
from megatron.preflight.run import collect_findings
from tests.support.tiny import write_tiny_corpus
from tests.unit.data.dialogues import random_dialogues, write_dialogues
from tests.unit.preflight.plans import plan


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each corpus was opened."""
    counts: Counter[str] = Counter()
    real = MMapIndexedDataset.__init__

    def counting(self: MMapIndexedDataset, prefix: str, **options: object) -> None:
        counts[str(prefix)] += 1
        real(self, prefix, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(MMapIndexedDataset, "__init__", counting)
    return counts


def test_all_checks_of_a_run_open_each_corpus_once(tmp_path: Path, opened: Counter[str]) -> None:
    a, b = write_tiny_corpus(tmp_path / "a"), write_tiny_corpus(tmp_path / "b", seed=1)
    missing = str(tmp_path / "none")
    chats = write_dialogues(tmp_path / "chats", random_dialogues(60))
    blend = plan(a, data_path=("1", a, "2", b, "1", a), eval_iters=1)
    apart = plan(a, data_path=None, train_data_path=(a,), valid_data_path=(a,), eval_iters=1)
    ranges = plan(
        a,
        data_path=None,
        train_weighted_split_paths=(f"T: 1 0:0.5 {a}, 1 0.5:0.8 {a}",),
        valid_weighted_split_paths=(f"V: 1 0.8:1 {a}", f"W: 1 0:1 {b}"),
        eval_iters=1,
    )
    packed = plan(chats, sft=True, eval_iters=1, split="60,20,20")
    lost = plan(a, data_path=("1", a, "1", missing), eval_iters=1)
    for asked, prefixes, errors in (
        (blend, {a, b}, 0),
        (apart, {a}, 1),  # no test data
        (ranges, {a, b}, 0),
        (packed, {f"{chats}_tokens_document", f"{chats}_mask_document"}, 0),
        (lost, {a, missing}, 1),
    ):
        opened.clear()
        found = collect_findings(asked, CHECKS)
        assert len(found) == errors, found
        assert opened == Counter(prefixes)


def test_a_corpus_that_cannot_be_opened_is_remembered_with_its_error(
    tmp_path: Path, opened: Counter[str]
) -> None:
    run_plan, missing = plan("nowhere"), str(tmp_path / "none")
    first, second = (run_plan.corpora.find(run_plan.config.data, missing) for _ in range(2))
    assert isinstance(first, DataError)
    assert first is second
    assert opened[missing] == 1
    assert list(run_plan.corpora.opened(plan(missing).config.data)) == []


@pytest.mark.parametrize(
    ("asked", "integrity"),
    [
        (DataIntegrity.OFF, DataIntegrity.OFF),
        (DataIntegrity.HEADER, DataIntegrity.HEADER),
        (DataIntegrity.TOUCHED, DataIntegrity.HEADER),
        (DataIntegrity.FULL, DataIntegrity.HEADER),
    ],
)
def test_checks_verify_headers_and_leave_tokens_to_the_datasets(
    tmp_path: Path, asked: DataIntegrity, integrity: DataIntegrity
) -> None:
    wanted = plan(write_tiny_corpus(tmp_path), data_integrity=asked, mmap_bin_files=True)
    (corpus,) = wanted.corpora.opened(wanted.config.data)
    assert isinstance(corpus, Corpus)
    assert (corpus.files[0].integrity, corpus.files[0].mapped) == (integrity, True)


def test_words_that_cannot_be_read_name_no_corpus() -> None:
    wanted = plan("x", data_path=("1", "a", "b"))
    assert list(wanted.corpora.opened(wanted.config.data)) == []
