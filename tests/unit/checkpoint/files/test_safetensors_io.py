"""Tensors to files and back: with the reference library, in blocks, in parts."""

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.files import safetensors_io as io
from megatron.checkpoint.files.threads import in_threads
from megatron.errors import CheckpointError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def values(dtype, *shape):
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)


def test_the_reference_library_reads_what_we_write(tmp_path):
    tensors = {str(dtype): values(dtype, 3, 5) for dtype in DTYPES}
    tensors["scalar"] = torch.tensor(3, dtype=torch.uint8)
    tensors["empty"] = torch.zeros(0, 4, dtype=torch.uint8)
    written = io.write(tmp_path / "f", list(tensors.items()), metadata={"a": "b"})
    content = (tmp_path / "f").read_bytes()
    assert written[:2] == (len(content), xxhash.xxh3_128_hexdigest(content))
    loaded = safetensors.torch.load_file(tmp_path / "f")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].dtype == tensor.dtype


def test_we_read_what_the_reference_library_writes(tmp_path):
    tensors = {str(dtype): values(dtype, 3, 5) for dtype in DTYPES}
    safetensors.torch.save_file(tensors, tmp_path / "f", metadata={"a": "b"})
    with io.Reader(tmp_path / "f") as reader:
        assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in tensors.items())


def test_each_tensor_has_a_digest_of_its_own_data(tmp_path):
    tensor = torch.arange(6.0)
    written = io.write(tmp_path / "f", [("a", tensor), ("b", torch.zeros(0))])
    assert written.tensors_xxh3[0] == xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes())


@pytest.mark.parametrize("block_bytes", [1, 24, 100, 1 << 20])
def test_blocks_of_any_size_give_the_same_file_and_the_same_parts(
    tmp_path, monkeypatch, block_bytes
):
    tensor = torch.arange(7 * 5 * 3.0).reshape(7, 3, 5).transpose(1, 2)  # strided
    whole = io.write(tmp_path / "whole", [("a", tensor)])
    monkeypatch.setattr(io, "_BLOCK_BYTES", block_bytes)
    assert io.write(tmp_path / "blocks", [("a", tensor)]) == whole
    target = torch.zeros(3, 2, 4)[..., ::2]
    with io.Reader(tmp_path / "blocks") as reader:
        reader.read_into("a", Box((2, 3, 1), (3, 2, 2)), target)
    assert torch.equal(target, tensor[2:5, 3:5, 1:3])


@given(st.data())
def test_any_box_of_any_tensor_is_read_as_it_was_written(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    tensor = torch.randn(shape).bfloat16()
    path = tmp_path_factory.mktemp("any") / "f"
    io.write(path, [("a", tensor)])
    spans = []
    for length in shape:
        start = data.draw(st.integers(0, length - 1))
        spans.append((start, data.draw(st.integers(start + 1, length))))
    box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
    target = torch.zeros(box.shape)  # another dtype: converted while copying
    with io.Reader(path) as reader:
        reader.read_into("a", box, target)
    assert torch.equal(target, tensor[box.slices].float())


def test_an_element_type_that_the_format_lacks_is_refused():
    with pytest.raises(CheckpointError, match="element type that checkpoints cannot hold"):
        io.dtype_code_of(torch.complex64)


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(tmp_path):
    io.write(tmp_path / "f", [("a", torch.zeros(100))])
    with io.Reader(tmp_path / "f") as reader:
        with open(tmp_path / "f", "r+b") as file:
            file.truncate(200)
        with pytest.raises(CheckpointError, match="became shorter"):
            reader.tensor("a")


def test_what_lies_in_memory_as_in_the_file_is_read_to_its_place_without_a_block(tmp_path):
    tensor = torch.arange(24.0).reshape(6, 4)
    io.write(tmp_path / "f", [("a", tensor)])
    target = torch.zeros(6, 4)
    with io.Reader(tmp_path / "f") as reader:
        reader.read_into("a", Box((1, 0), (4, 4)), target[2:])
        assert reader._buffer._bytes is None
        assert torch.equal(target[2:], tensor[1:5])
        assert not target[:2].any()
        for strided in (torch.zeros(4, 6).T, torch.zeros(6, 4, dtype=torch.float64)):
            reader.read_into("a", Box((0, 0), (6, 4)), strided)
            assert torch.equal(strided.float(), tensor)
        assert reader._buffer._bytes is not None


def test_the_memory_of_a_block_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "_BLOCK_BYTES", 32)
    tensor = torch.arange(24.0).reshape(6, 4)
    io.write(tmp_path / "f", [("a", tensor)])
    made, real = [], torch.empty
    monkeypatch.setattr(io.torch, "empty", lambda *a, **k: (made.append(a), real(*a, **k))[1])
    target = torch.zeros(4, 6).T
    with io.Reader(tmp_path / "f") as reader:
        for _ in range(3):
            reader.read_into("a", Box((0, 0), (6, 4)), target)
    assert torch.equal(target, tensor)
    assert made == [(32,)]
    made.clear()
    io.write(tmp_path / "strided", [("a", target), ("b", target[:, :2])])
    assert made == [(32,)]
    with io.Reader(tmp_path / "strided") as reader:
        assert torch.equal(reader.tensor("b"), tensor[:, :2])


def test_several_threads_read_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "_BLOCK_BYTES", 40)
    tensors = {f"t{i}": torch.full((9, 3), float(i)) for i in range(40)}
    io.write(tmp_path / "f", list(tensors.items()))
    targets = {name: torch.zeros(3, 9).T for name in tensors}  # through blocks
    with io.Reader(tmp_path / "f") as reader:

        def read(name):
            reader.read_into(name, Box((0, 0), (9, 3)), targets[name])

        in_threads(read, list(tensors), 4)
    assert all(torch.equal(targets[name], tensor) for name, tensor in tensors.items())
