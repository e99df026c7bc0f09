"""Every CUDA kernel compiles, without spills and with the resources of the kept table.

Needs nvcc and no GPU.
"""

import json
import shutil

import pytest

from benchmarks.kernel_resources import GPUS, TABLE, rows_of, version_of


@pytest.fixture(autouse=True)
def gpu() -> None:
    """In place of the fixture of this folder: a skipped test where there is no nvcc."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")


# That the table is of the kernels as they are is a test of every run:
# tests/programs/benchmarks/test_kernel_resources.py.
@pytest.mark.wide
@pytest.mark.parametrize("architecture", GPUS)
def test_kernels_compile_as_the_kept_table_says(architecture: str) -> None:
    nvcc = str(shutil.which("nvcc"))
    rows = rows_of(nvcc, architecture)
    assert rows
    assert [row for row in rows if row["spilled_bytes"]] == []
    kept = json.loads(TABLE.read_text(encoding="utf-8"))
    if version_of(nvcc) == kept["nvcc"]:  # another one may use other registers
        assert rows == kept["gpus"][architecture], "make kernel-resources WRITE=1"
