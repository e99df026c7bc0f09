"""The run on images, made short; the linear classifier sees the same images."""

import io
import json
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.quality import image_classes, image_transfer
from benchmarks.quality.image_classes import LINEAR, VIT, Images, Recipe, linear_share, pixels_of
from benchmarks.quality.image_transfer import INITIAL, PRETRAINED, compared, write_drawings
from megatron.data.vision.image_source import open_images
from tests.support.vision.images import write_images
from tests.support.warm_python import python_that_forks
from tests.unit.data.vision.test_image_source import write_idx, write_zip

pytestmark = pytest.mark.slow


def test_a_short_run_has_shares_of_vits_and_of_a_linear_classifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", python_that_forks()["PYTHON"])
    for name, count in (("train", 30), ("test", 4)):
        write_images(tmp_path / "c" / name, per_class=count, side=32)
    for at in range(7):  # ten classes, as CIFAR has
        for name in ("train", "test"):
            write_images(tmp_path / "more", per_class=1, first=at, side=32)
            (tmp_path / "more" / "ant").rename(tmp_path / "c" / name / f"x{at}")
    write_zip(tmp_path / "c.zip", tmp_path / "c", "cifar10/")
    words = ["--out", str(tmp_path / "out"), "--cifar", str(tmp_path / "c.zip"), "--seeds", "1"]
    words += ["--cifar-iterations", "2", "--json", str(tmp_path / "found.json")]
    image_classes.main(words)
    found = json.loads((tmp_path / "found.json").read_text())["found"]["CIFAR-10, 1,000 images"]
    assert 0 <= found[VIT][0] <= 1
    assert found[LINEAR][0] > 0.5, "colours are linear in pixels"
    assert "| CIFAR-10, 1,000 images |" in capsys.readouterr().out


def test_the_held_out_images_are_those_of_the_vit(tmp_path: Path) -> None:
    labels = [number % 3 for number in range(40)]
    path = str(write_idx(tmp_path, "t10k", labels))
    images = Images(path, 8, 1, (), Recipe(patch=4))
    train, classes, held_out, true = pixels_of(images)
    assert (len(train), len(held_out)) == (32, 8)
    assert sorted([*classes, *true]) == sorted(labels)
    every = open_images(path)
    assert {row.tobytes() for row in np.concatenate([train, held_out])} == {
        ((np.asarray(every.reader.read(at, 1)) / 255 - 0.5) / 0.5).ravel().tobytes()
        for at in range(40)
    }
    assert linear_share(images) <= 1


def write_omniglot(target: Path) -> Path:
    """Write a zip of drawings as Omniglot's: dark lines, characters below alphabets."""
    with zipfile.ZipFile(target, "w") as archive:
        for alphabet in ("Greek", "Latin"):
            for character, box in (
                ("character01", (20, 20, 23, 90)),
                ("character02", (10, 50, 90, 52)),
            ):
                for number in range(16):
                    drawing = Image.new("1", (105, 105), 1)
                    drawing.paste(0, box)
                    content = io.BytesIO()
                    drawing.save(content, "PNG")
                    name = f"images/{alphabet}/{character}/{number}.png"
                    archive.writestr(name, content.getvalue())
    return target


def test_drawings_become_bright_lines_in_folders_of_classes(tmp_path: Path) -> None:
    target = tmp_path / "drawings.zip"
    assert write_drawings(write_omniglot(tmp_path / "omniglot.zip"), target) == 4
    source = open_images(str(target))
    assert len(source) == 64
    for at in range(64):
        pixels = np.asarray(source.reader.read(at, 1))
        assert pixels.shape[:2] == (28, 28)
        assert pixels.max() > 200 > 50 > pixels.mean(), "a thick line on dark ground"


@pytest.mark.wide  # five starts of programs
def test_a_short_transfer_judges_both_starts_by_the_same_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", python_that_forks()["PYTHON"])
    digits = write_idx(tmp_path, "t10k", [number % 3 for number in range(1000)])
    words = ["--out", str(tmp_path / "out"), "--mnist", str(digits), "--iterations", "2"]
    words += ["--characters", str(write_omniglot(tmp_path / "omniglot.zip"))]
    words += ["--epochs", "1", "--seeds", "1", "2", "--json", str(tmp_path / "found.json")]
    image_transfer.main(words)
    found = json.loads((tmp_path / "found.json").read_text())["found"]
    assert found["images"] == 980
    assert {start: len(shares) for start, shares in found["shares"].items()} == {
        PRETRAINED: 2,
        INITIAL: 2,
    }
    assert f"{PRETRAINED} - {INITIAL}: " in capsys.readouterr().out


def test_the_error_of_a_difference_is_of_seeds_and_of_images() -> None:
    found = compared({PRETRAINED: [0.5, 0.7], INITIAL: [0.5, 0.5]}, 100)
    assert found.difference == pytest.approx(0.1)
    by_seed, by_image = 0.02 / 2, (0.6 * 0.4 + 0.5 * 0.5) / 100
    assert found.standard_error == pytest.approx((by_seed + by_image) ** 0.5)
