"""A ViT from images to a checkpoint that goes on, by its command, and what is wrong with images."""

import re
import sys
from pathlib import Path

import pytest

from tests.programs.test_dataset_kinds import losses
from tests.support.launch import ROOT, run_program
from tests.support.vision.images import write_images

VIT = str(ROOT / "pretrain_vit.py")
SMALL = [
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--num-classes", "3", "--img-dim", "8", "--patch-dim", "4", "--micro-batch-size", "8"),
    *("--lr", "0.01", "--lr-decay-style", "constant", "--log-interval", "1"),
    *("--num-workers", "0", "--device", "cpu", "--eval-iters", "1", "--eval-interval", "20"),
]

pytestmark = pytest.mark.slow


def test_help_is_there_without_torch(tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", VIT, "--help"]
    ended = run_program(words, cwd=tmp_path)
    assert ended.status == 0, ended.text
    assert "--patch-dim" in ended.out
    assert not re.search(r"\| +(torch|numpy|PIL)\b", ended.err)


def test_a_vit_learns_classes_of_folders_and_goes_on(tmp_path: Path) -> None:
    for name, first in (("train", 0), ("val", 50)):
        write_images(tmp_path / "data" / name, per_class=8, first=first)
    words = [sys.executable, VIT, *SMALL, "--data-path", "data", "--save", "vit"]
    words += ["--train-iters", "40"]
    first = run_program([*words, "--exit-interval", "2"], cwd=tmp_path)
    assert first.status == 0, first.text
    assert "--data-path data: taken as --train-data-path data/train" in first.out
    assert "--seq-length" not in first.out, "no length was given"
    ended = run_program([*words, "--load", "vit"], cwd=tmp_path)
    assert ended.status == 0, ended.text
    assert list(losses(ended.out, "classification loss")) == list(range(3, 41))
    assert "accuracy: 1.0000" in ended.out


def test_what_is_wrong_with_images_is_said_before_training(tmp_path: Path) -> None:
    train = Path(write_images(tmp_path / "data" / "train", per_class=8))
    valid = Path(write_images(tmp_path / "data" / "val", per_class=8))
    (train / "ant" / "003.png").write_bytes(b"not an image")
    (valid / "cow").rename(valid / "dog")
    words = [sys.executable, VIT, *SMALL, "--data-path", "data", "--train-iters", "1"]
    ended = run_program(words, cwd=tmp_path)
    assert ended.status == 65, ended.text
    assert "data/train: 1 of 24: data/train/ant/003.png (begins with b'not ')" in ended.text
    (valid / "dog").rename(valid / "cow")
    left = run_program([*words, "--max-broken-images", "1"], cwd=tmp_path)
    assert left.status == 0, left.text
    assert "left out 1 broken images" in left.text
