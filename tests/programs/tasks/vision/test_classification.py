"""Fine-tuning of a pretrained ViT, and the exact evaluation of a checkpoint on any grid."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, PreflightError
from tasks.vision import classification
from tests.programs.test_vit import SMALL, VIT
from tests.support.launch import ROOT, run_program
from tests.support.vision.images import CLASSES, write_images

MAIN = str(ROOT / "tasks" / "vision" / "main.py")
# float32, in another order of ranks.
CLOSE = 1e-5
SHAPE = SMALL[: SMALL.index("--eval-iters")]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, of which 13 are for validation, and a ViT that was pretrained on two classes."""
    root = Path(tmp_path_factory.mktemp("vision"))
    for name, first, count in (("train", 0, 16), ("val", 50, 5)):
        write_images(root / "data" / name, per_class=count, first=first)
    for path in sorted((root / "data" / "val" / CLASSES[0]).iterdir())[:2]:
        path.unlink()
    shutil.copytree(root / "data", root / "two")
    for name in ("train", "val"):
        shutil.rmtree(root / "two" / name / CLASSES[2])
    words = [*SHAPE, "--num-classes", "2", "--data-path", "two", "--save", "pretrained"]
    words += ["--train-iters", "30", "--eval-iters", "0"]
    ended = run_program([sys.executable, VIT, *words], cwd=root)
    assert ended.status == 0, ended.text
    return root


def classify(folder: Path, *words: str, ranks: int = 1) -> tuple[dict[str, Any], str]:
    start = [sys.executable, MAIN]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        start = [sys.executable, *launcher, MAIN]
    command = [*start, *SHAPE, "--data-path", "data", "--output", "found.json", *words]
    ended = run_program(command, cwd=folder, warm_children=True)
    assert ended.status == 0, ended.text
    return json.loads((folder / "found.json").read_text()), ended.out


def test_a_pretrained_vit_gets_a_new_head_and_is_evaluated(folder: Path) -> None:
    flags = ["--pretrained-checkpoint", "pretrained", "--save", "tuned"]
    found, said = classify(folder, *flags, "--epochs", "10")
    assert found == {"task": "VISION-CLASSIFY", "images": 13, **found}
    assert found["top-1"] > 0.9
    assert found["top-5"] == 1.0
    assert "classification_head" in said, "what stays at initial values is said"
    assert "from iteration 0 to 60" in said, "10 passes over 48 images in batches of 8"
    alone, said = classify(folder, "--load", "tuned", "--epochs", "0")
    assert alone == found
    assert f"top-1: {found['top-1']:.4f} | top-5: 1.0000" in said
    # More in a batch than there are images.
    one_batch, _ = classify(folder, "--load", "tuned", "--epochs", "0", "--micro-batch-size", "64")
    assert one_batch["loss"] == pytest.approx(found["loss"], rel=CLOSE)
    # Of 13 images the last micro-batches are short: 4 and 4, 4 and 1.
    words = ["--micro-batch-size", "4", "--global-batch-size", "8"]
    shared, _ = classify(folder, "--load", "tuned", "--epochs", "0", *words, ranks=2)
    assert (shared["images"], shared["top-1"]) == (13, found["top-1"])
    assert shared["loss"] == pytest.approx(found["loss"], rel=CLOSE)


def test_other_classes_need_another_head(folder: Path) -> None:
    words = [sys.executable, MAIN, *SHAPE, "--data-path", "data", "--load", "pretrained"]
    ended = run_program([*words, "--epochs", "0"], cwd=folder)
    assert ended.status != 0
    assert "classification_head.dense.weight" in ended.text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epochs", "0"], "there is no model to evaluate"),
        (["--epochs", "1"], "what was trained is evaluated as it was saved"),
        (["--epochs", "-1", "--save", "x"], "--epochs -1"),
        (["--epochs", "1", "--train-iters", "2", "--save", "x"], "--epochs 1, --train-iters"),
        (["--save", "x"], "--train-iters"),
        (["--epochs", "1", "--save", "x", "--split", "100,0,0"], "there are no images to evaluate"),
        (["--epochs", "1", "--save", "x", "--data-path", "1", "a", "2", "b"], "are of one path"),
    ],
)
def test_what_is_missing_or_given_twice_is_refused(
    tmp_path: Path, flags: list[str], message: str
) -> None:
    path = write_images(tmp_path / "images", per_class=2)
    with pytest.raises((ConfigError, PreflightError), match=re.escape(message)):
        classification.main("VISION-CLASSIFY", [*SHAPE, "--data-path", path, *flags])
