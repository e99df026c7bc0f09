"""Who says what: rank 0 for all, the last rank its steps, every rank its own errors."""

import pytest

from megatron import log


def test_what_all_ranks_would_say_is_said_by_rank_zero(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(0, 4)
    log.info("once")
    log.warning("beware")
    log.configure(1, 4)
    log.info("again")
    log.warning("beware again")
    out, err = capsys.readouterr()
    assert out == "once\n"
    assert err == "WARNING: beware\n"
    log.configure(0, 4)
    assert log.is_rank_zero()


def test_the_last_rank_says_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        log.configure(rank, 3)
        log.last_rank(f"step on {rank}")
    assert capsys.readouterr().out == "step on 2\n"


def test_errors_come_from_every_rank_with_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(3, 4)
    log.error("lost")
    log.configure(0, 1)
    log.error("alone")
    assert capsys.readouterr().err == "[rank 3] ERROR: lost\nERROR: alone\n"


def test_replicas_can_be_asked_to_speak(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(1, 2, replica_level="info")
    log.info("here too")
    log.debug("but not this")
    assert capsys.readouterr().err == "[rank 1] here too\n"


def test_levels_silence_rank_zero(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(0, 1, level="error")
    log.info("a")
    log.warning("b")
    log.last_rank("c")
    assert capsys.readouterr() == ("", "")
    log.configure(0, 1, level="debug")
    log.debug("d")
    assert capsys.readouterr().out == "d\n"


def test_a_warning_can_be_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    log.warning_once("key", "beware")
    log.warning_once("key", "beware")
    log.warning_once("other", "beware of that")
    assert capsys.readouterr().err.splitlines() == ["WARNING: beware", "WARNING: beware of that"]
