"""Without kernels in place these tests build them, so that nothing is left unchecked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.ops import library

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of the kernels, which are registered."""
    if library.INSTRUCTION_SET is not None:
        return library._FILE
    folder = tmp_path_factory.mktemp("kernels")
    places = ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *places],
        cwd=ROOT,
        env=os.environ | {"MEGATRON_BUILD_CUDA": "0"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    file = folder / "lib" / "megatron" / "ops" / "_kernels.so"
    assert file.exists(), built.stderr
    library.INSTRUCTION_SET = library._register_kernels(file)
    assert library.INSTRUCTION_SET is not None
    return file
