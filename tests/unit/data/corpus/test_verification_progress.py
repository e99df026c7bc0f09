"""A long verification logs at intervals, and reports to waiting ranks after each piece."""

import os

import numpy as np
import pytest

from megatron.config.data import DataIntegrity
from megatron.data.corpus import checksums, token_file
from megatron.data.corpus.verification_progress import VerificationProgress, no_progress
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.errors import DataError
from tests.unit.data.corpora import flip, write_corpus


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 64)
    monkeypatch.setattr(token_file, "_BLOCKS_PER_BEAT", 3)
    return write_corpus(tmp_path / "c", [100] * 10)  # 2000 bytes: 32 blocks, 11 pieces


def test_each_piece_is_heard_by_who_waits_and_the_log_hears_some(capsys):
    reports = []
    progress = VerificationProgress("c.bin", reports.append, log_every_s=0.0)
    progress(2**29, 2**31)
    assert reports == ["verifying c.bin: 0.50 of 2.00 GiB"]
    assert "verifying c.bin: 0.50 of 2.00 GiB, for 0 s now" in capsys.readouterr().out
    VerificationProgress("c.bin", reports.append, log_every_s=60.0)(2**30, 2**31)
    assert len(reports) == 2
    assert capsys.readouterr().out == ""
    assert no_progress("nothing") is None


def test_full_integrity_beats_between_the_pieces_and_reads_each_block_once(prefix, monkeypatch):
    reports, read = [], []
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, views, at: read.append(at) or preadv(file, views, at)
    )

    def report_progress(doing):
        reports.append((doing.split(":")[0], len(read)))

    corpus = MMapIndexedDataset(
        prefix, integrity=DataIntegrity.FULL, report_progress=report_progress
    )
    assert [doing for doing, _ in reports] == [f"verifying {prefix}.bin"] * 11
    assert [count for _, count in reports] == [*range(3, 33, 3), 32]
    assert sorted(read) == list(range(0, 2000, 64))
    corpus.get(3)
    assert len(read) == 33, "a token is read, and no block again"
    del reports[:]
    MMapIndexedDataset(prefix, report_progress=report_progress)
    assert reports == [], "only a whole verification takes long"


def test_damage_in_several_pieces_is_still_one_error(prefix):
    for at in (5, 1000, 1999):
        flip(prefix + ".bin", at)
    with pytest.raises(DataError) as raised:
        MMapIndexedDataset(prefix).verify()
    for block in (0, 960, 1984):
        assert f"bytes [{block}, " in str(raised.value)


def test_a_beat_that_fails_ends_the_verification(prefix):
    def lost(_):
        raise RuntimeError("the store is gone")

    with pytest.raises(RuntimeError, match="the store is gone"):
        MMapIndexedDataset(prefix).verify(lost)
    assert np.array_equal(MMapIndexedDataset(prefix)[0], np.arange(100))
