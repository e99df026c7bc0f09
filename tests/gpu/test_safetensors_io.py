"""Tensors of a GPU to files and back, through pinned blocks, by one thread and by several."""

from pathlib import Path

import pytest
import torch

from megatron import device
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.files import safetensors_io as io
from megatron.checkpoint.files.threads import in_threads

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("threads", [1, 4])
def test_tensors_of_a_gpu_are_written_and_read_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(io, "_BLOCK_BYTES", 1000)
    here = device.select("cuda", 0)
    tensors = {f"t{i}": torch.randn(70, 30, device=here) for i in range(8)}
    tensors["strided"] = torch.randn(30, 70, device=here).T
    io.write(tmp_path / "f", list(tensors.items()))
    targets = {name: torch.zeros(70, 30, device=here) for name in tensors}
    with io.Reader(tmp_path / "f") as reader:

        def read(name: str) -> None:
            reader.read_into(name, Box((0, 0), (70, 30)), targets[name])

        in_threads(read, list(tensors), threads)
    assert all(torch.equal(targets[name], tensor) for name, tensor in tensors.items())
