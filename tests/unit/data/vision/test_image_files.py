"""Images from folders, archives and arrays; what is broken is named."""

import builtins
import io
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.vision.image_files import (
    ArrayReader,
    FolderReader,
    ImageReader,
    TarMember,
    TarReader,
    ZipReader,
    decoded,
    has_header_of_image,
    require_pillow,
)
from megatron.errors import DataError, MachineError
from tests.support.vision.images import image


def encoded(kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image(0, 1).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def readers(tmp_path: Path) -> dict[str, ImageReader]:
    (tmp_path / "a.png").write_bytes(encoded())
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.png", encoded())
    with tarfile.open(tmp_path / "x.tar", "w") as shard:
        shard.add(tmp_path / "a.png", "a.png")
    with tarfile.open(tmp_path / "x.tar") as shard:
        found = shard.getmember("a.png")
    member = TarMember(0, "a.png", found.offset_data, found.size)
    return {
        "folder": FolderReader(str(tmp_path), ["a.png"]),
        "zip": ZipReader(str(tmp_path / "x.zip"), ["a.png"]),
        "tar": TarReader([str(tmp_path / "x.tar")], [member]),
        "array": ArrayReader("x", np.asarray(image(0, 1))[None]),
    }


@pytest.mark.parametrize("kind", ["folder", "zip", "tar", "array"])
def test_every_reader_gives_the_same_image(readers: dict[str, ImageReader], kind: str) -> None:
    reader = readers[kind]
    assert np.array_equal(reader.read(0, 3), np.asarray(image(0, 1)))
    assert reader.read(0, 1).mode == "L"
    header = reader.header(0)
    assert header is None if kind == "array" else has_header_of_image(header or b"")
    assert reader.name(0).endswith("image 0" if kind == "array" else "a.png")
    again = pickle.loads(pickle.dumps(reader))  # as worker processes get it
    assert np.array_equal(again.read(0, 3), np.asarray(image(0, 1)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM"])
def test_the_beginnings_of_formats_are_known(kind: str) -> None:
    assert has_header_of_image(encoded(kind)[:12])


@pytest.mark.parametrize("data", [b"", b"RIFF0000WAVE", b"text", encoded()[:60]])
def test_what_is_no_image_is_named(data: bytes) -> None:
    with pytest.raises(DataError, match="a file is no image, or is broken") as refused:
        decoded(data, 3, "cat/1.png")
    assert str(refused.value.found).startswith("cat/1.png: ")


def test_files_that_are_gone_are_named(readers: dict[str, ImageReader], tmp_path: Path) -> None:
    for name in ("a.png", "x.tar"):
        (tmp_path / name).unlink()
    for kind in ("folder", "tar"):
        with pytest.raises(DataError, match="No such file"):
            readers[kind].read(0, 3)
    damaged = bytearray((tmp_path / "x.zip").read_bytes())
    damaged[45] ^= 1
    (tmp_path / "x.zip").write_bytes(damaged)
    with pytest.raises(DataError, match=r"x\.zip/a\.png: Bad CRC-32"):
        readers["zip"].read(0, 3)


def test_pillow_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **keywords: Any) -> Any:
        if name.startswith("PIL"):
            raise ImportError("No module named 'PIL'")
        return real(name, *args, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MachineError, match="pip install pillow"):
        require_pillow()
