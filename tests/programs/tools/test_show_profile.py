"""show_profile.py: a table and lines for each trace, a picture, and what is no trace."""

import gzip
import json
from pathlib import Path

import pytest

from megatron.errors import DataError
from tools.show_profile import main


def write_trace(path: Path, *events: tuple[str, str, int, int]) -> str:
    listed = [
        {"ph": "X", "cat": cat, "name": name, "tid": 1, "ts": start, "dur": duration}
        for cat, name, start, duration in events
    ]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": listed}).encode()))
    return str(path)


CALL = ("user_annotation", "tp all_reduce, 2000000 bytes", 1000, 4000)
STEP = ("user_annotation", "step 11", 0, 10000)


def test_each_trace_has_a_table_and_a_line_for_each_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        write_trace(
            tmp_path / f"rank{rank}-step11-11.pt.trace.json.gz",
            STEP,
            CALL,
            ("cpu_op", "aten::mm", 2000, duration),
        )
        for rank, duration in enumerate((4000, 4000, 6000))
    ]
    picture = tmp_path / "steps.png"
    main([*paths, "--picture", str(picture)])
    out = capsys.readouterr().out
    assert out.startswith(
        f"{paths[0]}\n"
        "  matrix products                4.00 ms   40.0%\n"
        "  communication, exposed         1.00 ms   10.0%\n"
        "  idle                           5.00 ms   50.0%\n"
        "  a step                        10.00 ms\n"
        "  communication, hidden          3.00 ms\n"
        "  tp: overlapped 75% of 4.0 ms (1 calls, 2.0 MB)\n"
    )
    assert out.endswith(
        "rank2 computed 2.00 ms a step longer than the median rank, most of it in: "
        "matrix products\n"
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.suffix for path in tmp_path.iterdir() if path.suffix not in (".gz", ".png")] == []


def test_a_trace_without_a_whole_step_has_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "rank0.pt.trace.json.gz", CALL)
    with pytest.raises(DataError, match="nothing to draw"):
        main([trace, "--picture", str(tmp_path / "steps.png")])
    assert capsys.readouterr().out == f"{trace}\n  tp: overlapped 0% of 4.0 ms (1 calls, 2.0 MB)\n"
    assert not (tmp_path / "steps.png").exists()


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "trace.json.gz"
    for content in (b"text", gzip.compress(b"[]"), gzip.compress(b"{")):
        other.write_bytes(content)
        with pytest.raises(DataError, match="a trace cannot be read"):
            main([str(other)])
