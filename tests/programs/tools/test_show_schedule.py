"""show_schedule.py: the timeline to the letter, the numbers, the picture, the refusals."""

import struct
import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError, MachineError
from tests.support.launch import ROOT, run_program, unfinished
from tools.show_schedule import COLOURS, main

PNG = b"\x89PNG\r\n\x1a\n"

ZERO_BUBBLE = """\
zero-bubble: 3 stages, 4 micro-batches
F forward, B gradient of the input, W of the weights; number: micro-batch; dots: waiting

stage 0 F0 F1 F2 ......B0 W0 F3 B1 W1 B2 W2 B3 W3
stage 1 ...F0 F1 ...B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
stage 2 ......F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

one step        14 ms
bubble          14.29% of the step; by theory 14.29%
peak activations, stage by stage    3 3 3
                  by theory         3 3 3
  of them with all of their graph   3 2 1
(a peak of 1: what one micro-batch needs from its forward to its last backward)
"""

INTERLEAVED = """\
from 0 to 4.5 ms
stage 0 F0a F1a F2a F0b F1b ........F2b B0b-
stage 1 ....F0a F1a F2a F0b B0b---- F1b B1b-

from 4.5 to 9 ms
stage 0 --- B1b---- ....B2b---- B0a---- B1a-
stage 1 --- F2b B2b---- B0a---- B1a---- B2a-

from 9 to 10.5 ms
stage 0 --- B2a----
stage 1 --- ........
"""


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    main(words.split())
    return capsys.readouterr().out


def test_the_command_of_the_documents_shows_a_timeline_and_its_numbers(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tools.show_schedule"]
    words += ["--pp", "3", "--microbatches", "4", "--schedule", "zero-bubble"]
    ended = run_program(words, cwd=ROOT)
    assert (ended.status, ended.out) == (0, ZERO_BUBBLE), ended.text


def test_chunks_are_letters_and_long_timelines_are_wrapped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown("--pp 2 --microbatches 3 --schedule interleaved --chunks 2 --width 44", capsys)
    assert INTERLEAVED in text
    assert "bubble          14.29% of the step; by theory 14.29%" in text
    assert "one micro-batch in 1 of 2 chunks" in text


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "interleaved --chunks 3"])
def test_nothing_is_wider_than_asked(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    for times in ("", "--forward-ms 0.7 --backward-input-ms 1.1 --communication-ms 0.05"):
        words = f"--schedule {schedule} --pp 8 --microbatches 16 {times}"
        lines = shown(words, capsys).splitlines()
        assert max(map(len, lines)) <= 100
        assert not any(line != line.rstrip() for line in lines)


def test_megatrons_flag_names_are_taken_too(capsys: pytest.CaptureFixture[str]) -> None:
    long = (
        "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved "
        "--num-virtual-stages-per-pipeline-rank 2 --num-layers 4"
    )
    short = "--pp 2 --schedule interleaved --chunks 2"
    assert shown(long, capsys) == shown(short, capsys)


def test_one_stage_needs_no_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("--pp 1 --microbatches 2 --schedule none", capsys)
    assert "stage 0 F0 B0--- F1 B1---\n" in text
    assert "bubble          0.00% of the step; by theory 0.00%" in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--communication-ms 0.2", "theory has messages that take no time"),
        ("--schedule zero-bubble --forward-ms 2", "theory has F, B and W equally long"),
    ],
)
def test_where_theory_does_not_apply_it_is_said(
    words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"({reason})" in shown(words, capsys)
    assert reason not in shown("--schedule zero-bubble", capsys)


@pytest.mark.parametrize("schedule", ["zero-bubble", "interleaved --chunks 2"])
def test_a_picture_is_drawn_in_the_colours_of_its_legend(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib import image

    picture = tmp_path / "schedule.png"
    text = shown(f"--pp 2 --microbatches 3 --schedule {schedule} --png {picture}", capsys)
    assert text.endswith(f"wrote {picture}\n")
    content = picture.read_bytes()
    assert content.startswith(PNG)
    assert struct.unpack(">II", content[16:24])[0] >= 900
    pixels = {tuple(pixel) for row in image.imread(picture)[..., :3] for pixel in row}
    found = {"#" + "".join(f"{round(part * 255):02X}" for part in pixel) for pixel in pixels}
    wanted = {colour for letter, colour in COLOURS.items() if letter != "W" or "zero" in schedule}
    assert wanted <= found
    assert not unfinished(tmp_path)


def test_a_long_step_is_drawn_without_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "long.png"
    shown(f"--pp 2 --microbatches 300 --png {picture}", capsys)
    assert picture.read_bytes().startswith(PNG)


def test_a_picture_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(MachineError):
        main(["--pp", "2", "--microbatches", "2", "--png", str(tmp_path / "none" / "a.png")])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--schedule best", "there is no such pipeline schedule"),
        ("--pp 0", "a pipeline has at least one stage"),
        ("--microbatches 0", "a step has no micro-batch"),
        ("--chunks 2", "only the interleaved schedule gives a stage several parts"),
        ("--schedule interleaved --chunks 2 --microbatches 3", "needs a micro-batch for every"),
        ("--num-layers 3", "there are fewer layers than pipeline stages"),
        ("--num-layers 0", "a model has no layers"),
        ("--width 39", "the text would be too narrow to read"),
        ("--forward-ms 0", "a duration makes no sense"),
        ("--communication-ms -1", "a duration makes no sense"),
        ("--backward-weight-ms nan", "a duration makes no sense"),
        ("--forward-ms 1e-6", "the timeline would be too long to read"),
    ],
)
def test_what_cannot_be_shown_is_refused(words: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        main(words.split())
    assert caught.value.found is not None


def test_a_refusal_has_its_three_parts_and_an_exit_code(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "tools" / "show_schedule.py"), "--pp", "4", "--chunks", "2"]
    ended = run_program(words, cwd=tmp_path)
    assert ended.status == 64
    assert "found: --pipeline-schedule 1f1b, --num-virtual-stages-per-pipeline-rank 2" in ended.text
    assert "fix: use --pipeline-schedule interleaved, or drop the virtual stages" in ended.text
