"""Ranks wait for the one that compares a whole corpus, for longer than a collective may take."""

import time
from pathlib import Path
from typing import Any

import pytest

from megatron.data.corpus import checksums, token_file
from megatron.data.corpus.token_file import TokenFile
from megatron.mpu import progress_barrier
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run, train, write_tiny_corpus

PATIENCE_S = 3.0
PIECE_S = 0.1  # for 64 bytes, of which there are 80


def slowed_run(corpus: str) -> tuple[float, list[str]]:
    """A run with a slow builder: the seconds that this rank verified, and its reports."""
    progress_barrier._BEAT_S = 0.0
    token_file._BLOCKS_PER_BEAT = 1
    damages, report_progress = TokenFile._damages, progress_barrier.ProgressBarrier.report_progress
    spent: list[float] = []
    reports: list[str] = []

    def slowly(*given: Any) -> Any:
        time.sleep(PIECE_S)
        spent.append(PIECE_S)
        return damages(*given)

    def record_report(self: progress_barrier.ProgressBarrier, doing: str) -> None:
        reports.append(doing)
        report_progress(self, doing)

    TokenFile._damages = slowly  # type: ignore[method-assign]
    progress_barrier.ProgressBarrier.report_progress = record_report  # type: ignore[method-assign]
    minutes = PATIENCE_S / 60
    train(
        tiny_run(corpus, data_integrity="full", distributed_timeout_minutes=minutes, train_iters=1)
    )
    return sum(spent), reports


def test_a_verification_may_take_longer_than_the_ranks_are_patient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 64)
    corpus = write_tiny_corpus(tmp_path)
    (verified_s, reports), (touched_s, silence) = run_on_ranks(2, slowed_run, corpus)
    assert verified_s > 2 * PATIENCE_S
    assert touched_s < verified_s, "the rank that waits compares what it touches"
    assert reports[0].startswith(f"verifying {corpus}.bin: 0.00 of 0.00 GiB")
    assert len(reports) == round(verified_s / PIECE_S)
    assert silence == []
