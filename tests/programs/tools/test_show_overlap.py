"""show_overlap.py: a line for each group of a trace, and what is no trace."""

import gzip
import json
from pathlib import Path

import pytest

from megatron.errors import DataError
from tools.show_overlap import main


def test_each_group_of_a_trace_has_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [
        {"ph": "X", "cat": cat, "name": name, "tid": 1, "ts": start, "dur": 4000}
        for cat, name, start in (
            ("user_annotation", "tp all_reduce, 2000000 bytes", 1000),
            ("cpu_op", "aten::mm", 2000),
        )
    ]
    trace = tmp_path / "rank0.pt.trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    main([str(trace)])
    expected = f"{trace}\n  tp: overlapped 75% of 4.0 ms (1 calls, 2.0 MB)\n"
    assert capsys.readouterr().out == expected


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "trace.json.gz"
    for content in (b"text", gzip.compress(b"[]"), gzip.compress(b"{")):
        other.write_bytes(content)
        with pytest.raises(DataError, match="a trace cannot be read"):
            main([str(other)])
