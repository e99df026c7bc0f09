"""The row algorithms that CUDA runs, on the CPU under address and undefined-behaviour checks."""

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROWS = HERE.parents[2] / "csrc" / "ops"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program, compiled without optimisation: in a third of the time."""
    path = tmp_path_factory.mktemp("rows") / "sanitized_rows"
    flags = ["-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    made = subprocess.run(
        [
            os.environ.get("CXX", "c++"),
            *flags,
            f"-I{ROWS}",
            HERE / "sanitized_rows.cpp",
            "-o",
            path,
        ],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return path


def _run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=100, check=False
    )


def test_rows_touch_only_their_own_elements_and_lanes_agree(program):
    run = _run(program)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "all rows agree\n"


def test_a_row_that_is_too_long_is_seen(program):
    run = _run(program, "overrun")
    assert run.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in run.stderr


def test_a_pack_that_is_not_aligned_is_seen(program):
    run = _run(program, "unaligned")
    assert run.returncode != 0
    assert "misaligned address" in run.stderr
