"""The one place where tests of this folder are skipped: where there is no CUDA device.

Every test here is handed `gpu`, so that none can forget to ask; pytest counts the skips. The tests
that need nvcc and no device have a `gpu` of their own.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from megatron import device

# cuBLAS reads this once, when it starts; without it deterministic products are refused.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    """A CUDA device, or a skipped test; the process computes on the CPU again afterwards."""
    if not device.cuda_is_available():
        pytest.skip("needs a CUDA device")
    yield
    device.select("cpu")


@pytest.fixture
def deterministic() -> Iterator[None]:
    """torch refuses or replaces every kernel whose sums depend on the order of threads."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
