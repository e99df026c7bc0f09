"""Messages have three parts, survive the way between processes, and end programs with a code."""

import copy
import pickle
import signal
from typing import Any

import pytest

from megatron import errors
from megatron.errors import (
    ConfigError,
    Finding,
    MachineError,
    MegatronError,
    PreflightError,
    first_line,
    is_retryable,
)

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, MegatronError) and kind is not PreflightError
]


def test_a_message_says_problem_found_and_fix() -> None:
    error = ConfigError("the sizes differ", found="--a 1, --b 2", fix="use --b 1")
    assert str(error) == "the sizes differ\n  found: --a 1, --b 2\n  fix: use --b 1"


def test_what_was_found_may_be_left_out_and_the_fix_may_not() -> None:
    assert str(ConfigError("wrong", fix="mend it")) == "wrong\n  fix: mend it"
    assert "found: 0" in str(ConfigError("wrong", found=0, fix="mend it"))
    with pytest.raises(TypeError, match="fix"):
        ConfigError("wrong")  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_survives_the_way_between_processes(kind: type[MegatronError], again: Any) -> None:
    error = kind("wrong", found=("x", 1), fix="mend it")
    assert type(again(error)) is kind
    assert str(again(error)) == str(error)
    assert again(error).found == ("x", 1)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one", "one"),
        ("one\ntwo", "one"),
        ("\n one\n", "one"),
        ("", "ValueError"),
        (" \n", "ValueError"),
    ],
)
def test_the_first_line_of_an_error_is_never_empty(text: str, line: str) -> None:
    assert first_line(ValueError(text)) == line
    assert first_line(ValueError()) == "ValueError"


def test_exit_codes_tell_apart_who_has_to_act() -> None:
    codes = {kind.__name__: kind.exit_code for kind in KINDS}
    assert all(1 <= code < 126 for code in codes.values()), "126 and more belong to the shell"
    assert len(set(codes.values())) == len(codes)
    assert PreflightError.exit_code == ConfigError.exit_code


def test_only_failures_of_machines_and_going_back_are_worth_starting_again() -> None:
    retryable = {kind.__name__ for kind in [*KINDS, PreflightError] if kind.retryable}
    assert retryable == {"MachineError", "PeerError", "RewindError"}


def test_an_exit_code_is_retryable_as_its_class_is() -> None:
    assert {kind.exit_code: kind.retryable for kind in KINDS} == {
        kind.exit_code: is_retryable(kind.exit_code) for kind in KINDS
    }
    assert not any(is_retryable(status) for status in (0, 1, 2, 74, 77, 126, 127, 128))


@pytest.mark.parametrize(
    ("killed_by", "again"),
    [
        (signal.SIGKILL, True),
        (signal.SIGSEGV, True),
        (signal.SIGBUS, True),
        (signal.SIGABRT, True),
        (signal.SIGTERM, True),
        (signal.SIGUSR1, True),
        (signal.SIGINT, False),
        (signal.SIGQUIT, False),
        (signal.SIGHUP, False),
        (signal.SIGILL, False),
    ],
)
def test_a_killed_process_is_retryable_unless_a_person_or_its_program_ended_it(
    killed_by: signal.Signals, again: bool
) -> None:
    assert is_retryable(-killed_by) == again  # as subprocess gives it
    assert is_retryable(128 + killed_by) == again  # as a shell gives it


def test_a_report_lists_every_finding_under_its_check() -> None:
    report = PreflightError(
        [
            Finding("heads_split", ConfigError("uneven heads", found="12", fix="use 6")),
            Finding("disk_has_room", MachineError("the disk is full", fix="free 3 GiB")),
        ]
    )
    assert str(report).splitlines() == [
        "2 checks failed before training",
        "[heads_split] uneven heads",
        "  found: 12",
        "  fix: use 6",
        "[disk_has_room] the disk is full",
        "  fix: free 3 GiB",
    ]


def test_one_finding_is_one_check() -> None:
    report = PreflightError([Finding("a", ConfigError("wrong", fix="mend it"))])
    assert report.problem == "1 check failed before training"


def test_findings_of_one_class_end_the_program_as_that_class_does() -> None:
    full = Finding("a", MachineError("the disk is full", fix="free some"))
    wrong = Finding("b", ConfigError("wrong", fix="mend it"))
    assert (PreflightError([full, full]).exit_code, PreflightError([full]).retryable) == (75, True)
    mixed = PreflightError([full, wrong])
    assert (mixed.exit_code, mixed.retryable) == (64, False)


def test_a_report_survives_the_way_between_processes() -> None:
    report = PreflightError([Finding("a", ConfigError("wrong", found=[1], fix="mend it"))])
    again = pickle.loads(pickle.dumps(report))
    assert str(again) == str(report)
    assert type(again.findings[0].error) is ConfigError
