"""Wrong headers are refused before a byte of data is read."""

import json

import pytest

from megatron.checkpoint.files import safetensors_header as headers
from megatron.errors import CheckpointError


def file_with(path, text, data=b"\0" * 8, length=None):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def tensor(start=0, stop=8, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def test_what_is_encoded_is_read_back(tmp_path):
    text = headers.encode([("a", "F32", (2, 3)), ("b", "U8", ())], {"k": "v"})
    (tmp_path / "f").write_bytes(text + b"\0" * 25)
    header = headers.read(tmp_path / "f")
    assert header.metadata == {"k": "v"}
    assert header.entries["a"] == headers.Entry("F32", (2, 3), len(text), len(text) + 24)
    assert header.entries["b"].stop - header.entries["b"].start == 1
    assert len(text) % 64 == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (b"{]", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([], "not an object"),
        (b'{"a": 1, "a": 2}', "a: named twice"),
        ({"__metadata__": {"a": 1}}, "not text"),
        ({"a": 3}, "described as"),
        ({"a": tensor(dtype="F31")}, "described as"),
        ({"a": tensor(shape=(-2,))}, "described as"),
        ({"a": tensor(shape=(3,))}, "described as"),
        ({"a": tensor(stop=8.0)}, "described as"),
        ({"a": tensor(start=4, stop=12)}, "where"),
        ({"a": tensor(), "b": tensor()}, "where"),
        ({"a": tensor(stop=4, shape=(1,))}, "in a file of"),
        ({}, "in a file of"),
    ],
)
def test_a_header_that_cannot_be_right_is_refused(tmp_path, fields, message):
    with pytest.raises(CheckpointError, match="header that cannot be right") as caught:
        headers.read(file_with(tmp_path / "f", fields))
    assert message in str(caught.value)


@pytest.mark.parametrize("length", [3, 1 << 32, (1 << 64) - 1])
def test_a_header_longer_than_its_file_is_refused_without_reading_it(tmp_path, length):
    path = file_with(tmp_path / "f", b"", data=b"", length=length)
    with pytest.raises(CheckpointError, match="header that cannot be right"):
        headers.read(path)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(CheckpointError, match="header that cannot be right"):
        headers.read(tmp_path / "f")


def test_a_header_over_the_limit_of_the_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(headers, "MAX_HEADER_BYTES", 10)
    with pytest.raises(CheckpointError, match="header that cannot be right"):
        headers.read(file_with(tmp_path / "f", {"a": tensor()}))
