"""Which rank prints: rank 0 for all, the last rank its steps, every rank its own errors."""

import io
import logging
import os
import pty
import re
import subprocess
import sys
import termios

import pytest

from megatron import log
from tests.support.output import TIME, without_times


def test_what_all_ranks_would_say_is_said_by_rank_zero(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(0, 4)
    log.info("once")
    log.warning("beware")
    log.configure(1, 4)
    log.info("again")
    log.warning("beware again")
    out, err = capsys.readouterr()
    assert without_times(out) == "once\n"
    assert without_times(err) == "WARNING: beware\n"
    log.configure(0, 4)
    assert log.is_rank_zero()


def test_the_last_rank_says_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        log.configure(rank, 3)
        log.last_rank(f"step on {rank}")
    assert without_times(capsys.readouterr().out) == "step on 2\n"


def test_errors_come_from_every_rank_with_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(3, 4)
    log.error("lost")
    log.configure(0, 1)
    log.error("alone")
    assert without_times(capsys.readouterr().err) == "[rank 3] ERROR: lost\nERROR: alone\n"


def test_replicas_can_be_asked_to_speak(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(1, 2, replica_level="info")
    log.info("here too")
    log.debug("but not this")
    assert without_times(capsys.readouterr().err) == "[rank 1] here too\n"


def test_levels_silence_rank_zero(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(0, 1, level="error")
    log.info("a")
    log.warning("b")
    log.last_rank("c")
    assert capsys.readouterr() == ("", "")
    log.configure(0, 1, level="debug")
    log.debug("d")
    assert without_times(capsys.readouterr().out) == "DEBUG: d\n"
    log.configure(0, 2, level="critical", replica_level="critical")
    log.warning("e")
    log.error("errors are always printed")
    assert without_times(capsys.readouterr().err) == "[rank 0] ERROR: errors are always printed\n"


def test_a_warning_can_be_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    log.warning_once("key", "beware")
    log.warning_once("key", "beware")
    log.warning_once("other", "beware of that")
    lines = without_times(capsys.readouterr().err).splitlines()
    assert lines == ["WARNING: beware", "WARNING: beware of that"]


def test_the_first_line_of_a_message_has_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    log.info("short")
    log.last_rank("step 1\n iteration        1/")
    log.warning("beware\n  of this")
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"{TIME}short\n{TIME}step 1\n iteration        1/\n", out)
    assert re.fullmatch(rf"{TIME}WARNING: beware\n  of this\n", err)


def test_a_handler_of_the_users_own_receives_what_this_rank_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(rank)d %(levelname)s %(message)s"))
    log.configure(2, 3)
    logging.getLogger("megatron").addHandler(handler)
    try:
        log.info("not printed here")
        log.last_rank("100% done")
        log.error("lost")
    finally:
        logging.getLogger("megatron").removeHandler(handler)
    assert text.getvalue() == "2 INFO 100% done\n2 ERROR lost\n"
    assert "100% done" in capsys.readouterr().out


def test_what_a_program_logs_by_itself_does_not_double_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger().addHandler(handler)
    try:
        log.warning("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert (text.getvalue(), capsys.readouterr().err.count("once")) == ("", 1)


BAR = """
import sys
from megatron import log
rank, level = int(sys.argv[1]), sys.argv[2]
log.configure(rank, 2, level=level)
bar = log.ProgressBar(10, 4)
bar.update(7)
log.info("a line")
bar.update(10)
bar.close()
log.info("the end")
"""


def on_a_terminal(rank: int, level: str = "info") -> str:
    """Return what a program with a progress bar writes to a terminal of 80 columns."""
    ours, reference = pty.openpty()
    words = [sys.executable, "-c", BAR, str(rank), level]
    termios.tcsetwinsize(reference, (24, 80))
    done = subprocess.run(words, stdout=reference, stderr=reference, timeout=60, check=False)
    os.close(reference)
    read = b""
    while chunk := _read(ours):
        read += chunk
    os.close(ours)
    assert done.returncode == 0, read
    return read.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other side is closed
        return b""


def test_a_bar_with_the_time_to_go_is_drawn_on_a_terminal_by_the_last_rank() -> None:
    last = on_a_terminal(1)
    assert "40%|" in last
    assert re.search(r"100%\|.*\| 10/10 \[\d\d:\d\d<\d\d:\d\d, .* steps/s\]\n$", last)
    first = on_a_terminal(0)
    assert "%|" not in first
    # The line of another rank's bar is erased before a message, but only as long as there is a bar.
    assert re.fullmatch(rf"\r\x1b\[K{TIME}a line\n{TIME}the end\n", first)


def test_a_level_that_silences_steps_draws_no_bar() -> None:
    assert on_a_terminal(1, "error") == ""


def test_no_bar_is_drawn_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bar = log.ProgressBar(10, 0)
    bar.update(5)
    log.info("a line")
    bar.close()
    out, err = capsys.readouterr()
    assert (without_times(out), err) == ("a line\n", "")


def test_a_hidden_value_is_in_no_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log._OUTPUT, "secrets", set())
    log.hide(["f4ke.key", "f4ke.key-and-more", ""])
    log.info("a f4ke.key-and-more, a f4ke.key, no f4ke-key")
    log.last_rank("step f4ke.key")
    log.error("ValueError: f4ke.key")
    out, err = capsys.readouterr()
    assert without_times(out) == "a (redacted), a (redacted), no f4ke-key\nstep (redacted)\n"
    assert without_times(err) == "ERROR: ValueError: (redacted)\n"
