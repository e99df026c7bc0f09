"""Images of every kind of path, their classes, and what is wrong with a path."""

import gzip
import io
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.config.models.vision import ImageCheck
from megatron.data.corpus.sources import data_sources
from megatron.data.vision.image_source import (
    ImageSource,
    image_digest,
    open_images,
    splits_under,
)
from megatron.errors import DataError
from tests.support.vision.images import CLASSES, image, write_images
from tests.unit.config.groups import some_data


def values(source: ImageSource) -> list[int]:
    """The mean of the colour of its class, over the images in order."""
    positions = source.positions.tolist()
    return [int(np.asarray(source.reader.read(at, 3)).argmax(-1).mean() + 0.5) for at in positions]


def write_zip(path: Path, folder: Path, prefix: str = "") -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*.png")):
            archive.write(file, prefix + str(file.relative_to(folder)))


def write_tar(path: Path, labels: list[int], *, first: int = 0) -> None:
    with tarfile.open(path, "w") as shard:
        for number, label in enumerate(labels, start=first):
            buffer = io.BytesIO()
            image(number, label).save(buffer, "PNG")
            for ending, data in (("png", buffer.getvalue()), ("cls", str(label).encode())):
                info = tarfile.TarInfo(f"s/{number:04d}.{ending}")
                info.size = len(data)
                shard.addfile(info, io.BytesIO(data))


def write_idx(folder: Path, name: str, labels: list[int], *, pack: bool = False) -> Path:
    grays = np.stack([np.asarray(image(n, label).convert("L")) for n, label in enumerate(labels)])
    ending = ".gz" if pack else ""
    for kind, array in (("images-idx3", grays), ("labels-idx1", np.array(labels, np.uint8))):
        head = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
        data = head + array.astype(np.uint8).tobytes()
        path = folder / f"{name}-{kind}-ubyte{ending}"
        path.write_bytes(gzip.compress(data) if pack else data)
    return folder / f"{name}-images-idx3-ubyte{ending}"


def write_cifar(path: Path, labels: list[int], *, coarse: bool = False) -> None:
    records = b""
    for number, label in enumerate(labels):
        planes = np.asarray(image(number, label, 32)).transpose(2, 0, 1)
        records += bytes((7, label) if coarse else (label,)) + planes.tobytes()
    path.write_bytes(records)


def test_folders_are_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    source = open_images(write_images(tmp_path, per_class=3))
    assert source.classes == CLASSES
    assert source.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert values(source) == source.labels.tolist()
    (tmp_path / "ant" / "notes.txt").write_text("no image")
    assert len(open_images(str(tmp_path))) == 9


def test_an_archive_holds_the_same_as_its_folder(tmp_path: Path) -> None:
    folder = open_images(write_images(tmp_path / "f", per_class=2))
    write_zip(tmp_path / "flat.zip", tmp_path / "f")
    write_zip(tmp_path / "deep.zip", tmp_path / "f", "all/train/")
    for path in ("flat.zip", "deep.zip/all/train"):
        source = open_images(str(tmp_path / path))
        assert (source.classes, source.labels.tolist()) == (CLASSES, folder.labels.tolist())
        assert values(source) == values(folder)


def test_shards_hold_images_beside_numbers_of_classes(tmp_path: Path) -> None:
    write_tar(tmp_path / "a-000.tar", [0, 2])
    write_tar(tmp_path / "a-001.tar", [1], first=2)
    for path in (tmp_path, tmp_path / "a-*.tar", tmp_path / "a-{000..001}.tar"):
        source = open_images(str(path))
        assert source.labels.tolist() == [0, 2, 1] == values(source)
        assert source.classes == ("0", "1", "2")


@pytest.mark.parametrize("pack", [False, True])
def test_files_of_mnist_are_read(tmp_path: Path, pack: bool) -> None:
    path = write_idx(tmp_path, "t10k", [2, 0, 1], pack=pack)
    for name in (path, tmp_path):
        source = open_images(str(name))
        assert source.labels.tolist() == [2, 0, 1]
        expected = np.asarray(image(2, 1).convert("L"))
        assert np.array_equal(source.reader.read(2, 1), expected)


@pytest.mark.parametrize("coarse", [False, True])
def test_binary_files_of_cifar_are_read(tmp_path: Path, coarse: bool) -> None:
    write_cifar(tmp_path / "data_batch_1.bin", [2, 0], coarse=coarse)
    write_cifar(tmp_path / "data_batch_2.bin", [1], coarse=coarse)
    source = open_images(str(tmp_path / "data_batch_*.bin"))
    assert source.labels.tolist() == [2, 0, 1] == values(source)


def test_paths_of_two_splits_are_found(tmp_path: Path) -> None:
    def splits(path: str) -> list[str] | None:
        found = splits_under(str(tmp_path / path))
        return None if found is None else [str(Path(one).relative_to(tmp_path)) for one in found]

    for name in ("f/train", "f/val", "c", "m", "h"):
        write_images(tmp_path / name, per_class=1) if "f/" in name else (tmp_path / name).mkdir()
    write_zip(tmp_path / "x.zip", tmp_path / "f", "all/")
    for name in ("data_batch_1.bin", "test_batch.bin"):
        write_cifar(tmp_path / "c" / name, [0])
    for name in ("train.bin", "test.bin"):
        write_cifar(tmp_path / "h" / name, [0], coarse=True)
    for name in ("train", "t10k"):
        write_idx(tmp_path / "m", name, [0])
    assert splits("f") == ["f/train", "f/val"]
    assert splits("x.zip") == ["x.zip/all/train", "x.zip/all/val"]
    assert splits("c") == ["c/data_batch_*.bin", "c/test_batch.bin"]
    assert splits("h") == ["h/train.bin", "h/test.bin"]
    assert splits("m") == ["m/train-images-idx3-ubyte", "m/t10k-images-idx3-ubyte"]
    assert splits("f/train") is None
    assert splits("absent") is None
    assert open_images(str(tmp_path / "x.zip/all/val")).classes == CLASSES


def test_broken_files_are_named_counted_and_left_out_up_to_a_number(tmp_path: Path) -> None:
    path = write_images(tmp_path, per_class=2)
    (tmp_path / "ant" / "000.png").write_bytes(b"")
    cut = tmp_path / "bee" / "001.png"
    cut.write_bytes(cut.read_bytes()[:-60])
    with pytest.raises(DataError, match=r"1 of 6: .*ant/000\.png \(begins with b''\)"):
        open_images(path)
    with pytest.raises(DataError, match="leave them out with --max-broken-images 2") as refused:
        open_images(path, check=ImageCheck.FULL, max_broken=1)
    assert "bee/001.png: " in str(refused.value.found)
    left = open_images(path, check=ImageCheck.FULL, max_broken=2)
    assert left.labels.tolist() == [0, 1, 2, 2]
    assert values(left) == [0, 1, 2, 2]


def empty_class(folder: Path) -> str:
    (folder / "dog").mkdir()
    return str(folder)


def pickled(folder: Path) -> str:
    (folder / "data_batch_1").write_bytes(b"\x80\x04.")
    return str(folder / "data_batch_1")


def pickles(folder: Path) -> str:
    (folder / "batches.meta").write_bytes(b"\x80\x04.")
    return str(folder)


def text(folder: Path) -> str:
    (folder / "images.txt").write_text("1")
    return str(folder / "images.txt")


def short_idx(folder: Path) -> str:
    path = write_idx(folder, "train", [0, 1])
    path.write_bytes(path.read_bytes()[:-1])
    return str(path)


def foreign_idx(folder: Path) -> str:
    path = write_idx(folder, "train", [0, 1])
    path.write_bytes(b"\0\0\x0d\3")
    return str(path)


def lone_labels(folder: Path) -> str:
    path = write_idx(folder, "train", [0, 1])
    other = write_idx(folder, "t10k", [0])
    other.rename(path)
    return str(path)


def no_labels(folder: Path) -> str:
    path = write_idx(folder, "train", [0, 1])
    (folder / "train-labels-idx1-ubyte").unlink()
    return str(path)


def short_cifar(folder: Path) -> str:
    (folder / "test.bin").write_bytes(b"123")
    return str(folder / "test.bin")


def no_archive(folder: Path) -> str:
    (folder / "x.zip").write_bytes(b"123")
    return str(folder / "x.zip")


def cut_shard(folder: Path) -> str:
    (folder / "x.tar").write_bytes(b"123" * 400)
    return str(folder / "x.tar")


def no_class(folder: Path) -> str:
    with tarfile.open(folder / "x.tar", "w") as shard:
        shard.add(folder / "ant" / "000.png", "7.png")
    return str(folder / "x.tar")


def no_number(folder: Path) -> str:
    with tarfile.open(folder / "x.tar", "w") as shard:
        info = tarfile.TarInfo("7.cls")
        info.size = 3
        shard.addfile(info, io.BytesIO(b"ant"))
    return str(folder / "x.tar")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: str(folder / "absent"), "there are no images at a path"),
        (lambda folder: str(folder / "ant"), "no folder in it"),
        (empty_class, "no image in dog"),
        (pickled, "pickles are not read"),
        (pickles, "pickles are not read"),
        (text, "of no kind that images are read from"),
        (short_idx, r"127 values, and its header says \(2, 8, 8\)"),
        (foreign_idx, "it begins with 00000d03"),
        (lone_labels, "1 images, train-labels-idx1-ubyte: 2 labels"),
        (no_labels, "a file of images cannot be read"),
        (short_cifar, "3 bytes are no records of 3072 values"),
        (no_archive, "File is not a zip file"),
        (cut_shard, "no tar archive, or is cut short"),
        (no_class, "1 without one of them, such as /7"),
        (no_number, "the class of a sample is not a whole number"),
        (lambda folder: f"{folder}/a-{{0..1}}.tar", "there is no such shard"),
    ],
)
def test_what_is_wrong_with_a_path_is_said(
    tmp_path: Path, damage: Callable[[Path], str], message: str
) -> None:
    write_images(tmp_path, per_class=1)
    with pytest.raises(DataError, match=message):
        open_images(damage(tmp_path))


def test_files_that_change_while_they_are_read_are_noticed(tmp_path: Path) -> None:
    source = open_images(write_images(tmp_path, per_class=1))
    source.check_unchanged()
    (tmp_path / "ant" / "new.png").write_bytes(b"")
    with pytest.raises(DataError, match="images changed while they were read"):
        source.check_unchanged()


def test_the_digest_changes_with_names_and_sizes(tmp_path: Path) -> None:
    path = write_images(tmp_path, per_class=1)
    before = open_images(path).digest
    assert image_digest(path) == before
    assert data_sources(some_data(data_path=(path,))) == {f"images of {path}": f"xxh3_128 {before}"}
    (tmp_path / "ant" / "000.png").rename(tmp_path / "ant" / "001.png")
    assert open_images(path).digest != before
    assert image_digest(str(tmp_path / "absent")) is None
