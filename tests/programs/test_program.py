"""How programs end: our errors by message and code, everything else with its traceback."""

import pytest

from megatron.errors import DataError
from tools.program import run


def _damaged() -> None:
    raise DataError("the file is damaged", found="a.bin", fix="copy it again")


def _interrupted() -> None:
    raise KeyboardInterrupt


def _defect() -> None:
    raise ZeroDivisionError


def test_our_errors_are_a_message_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(_damaged)
    assert caught.value.code == DataError.exit_code
    assert capsys.readouterr().err == (
        "ERROR: the file is damaged\n  found: a.bin\n  fix: copy it again\n"
    )


def test_an_interrupt_ends_as_shells_count_it() -> None:
    with pytest.raises(SystemExit) as caught:
        run(_interrupted)
    assert caught.value.code == 130


def test_a_defect_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run(_defect)
