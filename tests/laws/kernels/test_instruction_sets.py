"""The law of kernels for the instruction sets that a CPU of this machine would not choose."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.ops import library

ROOT = Path(__file__).resolve().parents[3]
CODE = """
import pathlib, sys
from megatron.ops import library
from tests.laws.kernels import activations, attentions, blocks, dropouts, losses
from tests.laws.kernels import norms, products, rotations, updates
found = library.INSTRUCTION_SET or library._register_kernels(pathlib.Path(sys.argv[1]))
assert found == sys.argv[2], found
activations.check_some()
attentions.check_some()
blocks.check_some()
dropouts.check_some()
losses.check_some()
norms.check_some()
products.check_some()
rotations.check_some()
updates.check_some()
"""


@pytest.mark.slow
def test_kernels_of_lesser_instruction_sets_compute_what_the_reference_means(kernels):
    lesser = [("default", "plain"), ("avx2", "avx2")]
    for limit, name in lesser[: 1 + (library.INSTRUCTION_SET == "avx512")]:
        run = subprocess.run(
            [sys.executable, "-c", CODE, kernels, name],
            env=os.environ | {"ATEN_CPU_CAPABILITY": limit},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert run.returncode == 0, run.stderr
