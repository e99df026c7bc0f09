"""A ViT pretrained on drawn characters, then fine-tuned on a few digits: does pretraining help?

`python benchmarks/quality/image_transfer.py --out FOLDER --characters ZIP --mnist FILE`: Omniglot's
drawings of characters (Lake et al. 2015), of five alphabets without a digit, are made as large, as
thick and as bright as MNIST's digits. A ViT learns their classes by pretrain_vit.py. The task
VISION-CLASSIFY fine-tunes it on 2 % of MNIST's file, and the same network from initial values;
both are judged by the other 98 %. Nothing is chosen by what is judged.
"""

import argparse
import io
import json
import math
import statistics
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.quality.image_classes import Images, Recipe, training_flags, vit_flags
from benchmarks.quality.steps import Steps, module, on_ranks
from megatron.data.vision.image_source import open_images
from megatron.program import run_program

PRETRAINED, INITIAL = "pretrained", "initial values"
SIDE = 28  # of MNIST's images
_STROKE = 5  # pixels by which a line of a drawing of 105 x 105 is made thicker
_SPLIT = "2,98,0"
_CHANGES = ("--random-crop-area", "1", "--no-random-flip", "--random-shift", "0.07")


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """How both networks learn the digits."""

    epochs: int = 60
    batch: int = 20
    lr: float = 1e-3
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)


class Compared(NamedTuple):
    """Shares of right answers by seed, and what tells the two ways apart.

    Attributes:
        standard_error: of the difference of the means, from the seeds and from the images.
    """

    shares: Mapping[str, Sequence[float]]
    images: int
    difference: float
    standard_error: float


def write_drawings(source: Path, target: Path) -> int:
    """Write drawings as bright lines on dark ground, each class a folder; return how many classes.

    Args:
        source: a zip of .../ALPHABET/CHARACTER/NAME.png, dark lines on bright ground.
    """
    from PIL import Image, ImageFilter, ImageOps

    classes = set()
    with zipfile.ZipFile(source) as drawings, zipfile.ZipFile(target, "w") as written:
        for name in drawings.namelist():
            if not name.endswith(".png"):
                continue
            *_, alphabet, character, file = PurePosixPath(name).parts
            with Image.open(io.BytesIO(drawings.read(name))) as drawing:
                lines = ImageOps.invert(drawing.convert("L"))
            thick = lines.filter(ImageFilter.MaxFilter(_STROKE))
            small = thick.resize((SIDE, SIDE), Image.Resampling.BOX)
            content = io.BytesIO()
            small.save(content, "PNG")
            classes.add(f"{alphabet}-{character}")
            written.writestr(f"{alphabet}-{character}/{file}", content.getvalue())
    return len(classes)


def pretrain(steps: Steps, drawings: Path, classes: int, recipe: Recipe) -> Path:
    """Train a ViT to tell the classes of drawings apart; return its folder."""
    save = steps.folder / "characters"
    changes = ("--random-rotation", "10", "--split", "100,0,0")
    images = Images(str(drawings), SIDE, 1, (*_CHANGES, *changes), recipe, classes)
    flags = (*vit_flags(images), *training_flags(recipe, save, recipe.seeds[0]))
    steps.run("a ViT of characters", on_ranks(1, "pretrain_vit.py", *flags))
    return save


def finetune(
    steps: Steps, digits: str, recipe: FineTuning, model: Recipe, begin: Path | None, seed: int
) -> tuple[float, int]:
    """Fine-tune on few digits; return the share of the others that is right, and how many.

    Args:
        begin: the folder of the pretrained ViT; None: initial values.
    """
    start = INITIAL if begin is None else PRETRAINED
    save = steps.folder / f"digits-{start.replace(' ', '-')}-{seed}"
    images = Images(digits, SIDE, 1, (*_CHANGES, "--split", _SPLIT), model)
    output = save.with_suffix(".json")
    steps.run(
        f"digits from {start}, seed {seed}",
        module(
            "tasks.main",
            *("--task", "VISION-CLASSIFY", *vit_flags(images), "--epochs", recipe.epochs),
            *([] if begin is None else ["--pretrained-checkpoint", begin]),
            *("--micro-batch-size", recipe.batch, "--lr", recipe.lr, "--min-lr", 0),
            *("--lr-decay-style", "cosine", "--lr-warmup-fraction", 0.1),
            *("--weight-decay", 0.05, "--adam-beta2", 0.99, "--seed", seed),
            *("--save", save, "--log-interval", 100, "--output", output),
        ),
    )
    found = json.loads(output.read_text())
    return float(found["top-1"]), int(found["images"])


def compared(shares: Mapping[str, Sequence[float]], images: int) -> Compared:
    """Return the difference of the means of two ways, and its standard error.

    The images are the same for both, which is left out of account: it makes the error smaller.
    """
    means = {start: statistics.fmean(found) for start, found in shares.items()}
    by_seed = sum(statistics.variance(found) / len(found) for found in shares.values())
    by_image = sum(mean * (1 - mean) / images for mean in means.values())
    difference = means[PRETRAINED] - means[INITIAL]
    return Compared(shares, images, difference, math.sqrt(by_seed + by_image))


def table(found: Compared) -> Iterator[str]:
    """Yield the lines of a table in Markdown, and the difference."""
    yield f"| fine-tuned from | right of {found.images} digits | each seed |"
    yield "|---|---|---|"
    for start, shares in found.shares.items():
        seeds = ", ".join(f"{100 * share:.1f}" for share in shares)
        yield f"| {start} | {statistics.fmean(shares):.1%} | {seeds} |"
    yield ""
    points, error = 100 * found.difference, 100 * found.standard_error
    yield f"{PRETRAINED} - {INITIAL}: {points:+.1f} points (standard error {error:.1f})"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps that are not done yet, and print shares of right answers."""
    parser = argparse.ArgumentParser(prog="image_transfer", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="where everything goes")
    add("--characters", type=Path, required=True, metavar="ZIP", help="Omniglot's drawings")
    add("--mnist", required=True, metavar="FILE", help="an images-idx3-ubyte file, labels beside")
    add("--iterations", type=int, default=1500, help="of pretraining [%(default)s]")
    add("--epochs", type=int, default=FineTuning.epochs, help="of fine-tuning [%(default)s]")
    add("--seeds", type=int, nargs="+", default=[*FineTuning.seeds], help="of it [1 2 3 4 5]")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    flags = parser.parse_args(argv)
    steps, model = Steps(flags.out), Recipe(iterations=flags.iterations)
    recipe = FineTuning(epochs=flags.epochs, seeds=tuple(flags.seeds))
    drawings = flags.out / "drawings.zip"
    classes = write_drawings(flags.characters, drawings)
    print(f"{len(open_images(str(drawings)))} drawings of {classes} characters")
    begin = pretrain(steps, drawings, classes, model)
    shares: dict[str, list[float]] = {PRETRAINED: [], INITIAL: []}
    images = 0
    for seed in recipe.seeds:
        for start, folder in ((PRETRAINED, begin), (INITIAL, None)):
            share, images = finetune(steps, flags.mnist, recipe, model, folder, seed)
            shares[start].append(share)
    found = compared(shares, images)
    print("\n".join(["", *table(found)]))
    steps.write_report(
        flags.json,
        "image_transfer",
        pretraining=asdict(model),
        fine_tuning=asdict(recipe),
        classes=classes,
        found=found._asdict(),
    )


if __name__ == "__main__":
    run_program(main)
