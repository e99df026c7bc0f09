"""ViTs trained from random weights on small sets of images, beside a linear classifier of pixels.

`python benchmarks/quality/image_classes.py --out FOLDER --mnist FILE --cifar FILE`: MNIST's file of
images, of which every fifth is held out by a rule that is fixed before (the share of validation in
`--split 80,20,0`), and a zip of CIFAR-10's images in folders of train and test. Each ViT is trained
by pretrain_vit.py and judged by the task VISION-CLASSIFY; the linear classifier sees the same
images.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.quality.steps import Steps, module, on_ranks
from megatron.config.models.vision import VisionConfig
from megatron.data.vision.image_dataset import normalised
from megatron.data.vision.image_maker import shuffled_images
from megatron.data.vision.image_source import ImageSource, open_images, splits_under
from megatron.program import run_program

VIT, LINEAR = "ViT", "linear classifier of pixels"
# Inverse strengths of regularisation that the linear classifier is tried with.
STRENGTHS = (1e-4, 1e-3, 1e-2)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The shape of a ViT, and how it is trained."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    patch: int = 7
    iterations: int = 2200
    batch: int = 64
    lr: float = 3e-3
    seeds: tuple[int, ...] = (1,)


class Images(NamedTuple):
    """A set of images: how it is named and cut, how it is augmented, and who learns it."""

    path: str
    side: int
    channels: int
    flags: tuple[str, ...]
    recipe: Recipe
    classes: int = 10


def sets_of(flags: argparse.Namespace) -> dict[str, Images]:
    """Return the sets of images that were named, by their names."""
    found = {}
    if flags.mnist is not None:
        changes = ("--random-shift", "0.07", "--no-random-flip")
        recipe = Recipe(iterations=flags.mnist_iterations)
        plain = ("--random-crop-area", "1", "--split", "80,20,0")
        found["MNIST"] = Images(flags.mnist, 28, 1, (*plain, *changes), recipe)
    if flags.cifar is not None:
        recipe = Recipe(
            iterations=flags.cifar_iterations, patch=8, batch=50, lr=2e-3, seeds=tuple(flags.seeds)
        )
        crops = ("--random-crop-area", "0.5", "--image-mean", "0.5", "--image-std", "0.25")
        found["CIFAR-10, 1,000 images"] = Images(flags.cifar, 32, 3, crops, recipe)
    return found


def trained(steps: Steps, name: str, images: Images) -> list[float]:
    """Return the share of held-out images that a ViT of each seed has right."""
    shares = []
    for seed in images.recipe.seeds:
        save = steps.folder / name.split(",")[0].replace(" ", "-") / str(seed)
        flags = list(vit_flags(images))
        training = training_flags(images.recipe, save, seed)
        steps.run(f"{name}: ViT, seed {seed}", on_ranks(1, "pretrain_vit.py", *flags, *training))
        output = save / "found.json"
        steps.run(
            f"{name}: ViT, seed {seed}, held-out images",
            module(
                "tasks.main",
                *("--task", "VISION-CLASSIFY", *flags, "--epochs", 0, "--load", save),
                *("--micro-batch-size", 100, "--lr", 1, "--output", output),
            ),
        )
        shares.append(float(json.loads(output.read_text())["top-1"]))
    return shares


def vit_flags(images: Images) -> Iterator[object]:
    """Yield the flags of a ViT of these images."""
    recipe = images.recipe
    yield from ("--num-layers", recipe.layers, "--hidden-size", recipe.hidden)
    yield from ("--num-attention-heads", recipe.heads, "--patch-dim", recipe.patch)
    yield from ("--img-dim", images.side, "--num-channels", images.channels)
    yield from ("--num-classes", images.classes)
    yield from ("--image-pooling", "mean", "--init-method-std", 0.1)
    yield from ("--hidden-dropout", 0, "--attention-dropout", 0, "--num-workers", 0)
    yield from ("--data-path", images.path, *images.flags)


def training_flags(recipe: Recipe, save: Path, seed: int) -> Iterator[object]:
    """Yield the flags of its training, which is saved in a folder."""
    yield from ("--micro-batch-size", recipe.batch, "--train-iters", recipe.iterations)
    yield from ("--lr", recipe.lr, "--lr-decay-style", "cosine", "--lr-warmup-fraction", 0.1)
    yield from ("--min-lr", 0, "--weight-decay", 0.05, "--adam-beta2", 0.99, "--eval-iters", 0)
    yield from ("--seed", seed, "--save", save, "--log-interval", max(1, recipe.iterations // 10))


def pixels_of(images: Images) -> tuple[npt.NDArray[np.float64], ...]:
    """Return pixels and classes of training and of held-out images, as the ViT's program has them.

    [n, pixels] and [n], twice.
    """
    vision = VisionConfig(
        img_dim=images.side, patch_dim=images.recipe.patch, num_channels=images.channels
    )
    found = splits_under(images.path)
    if found is not None:
        train, valid = (open_images(path) for path in found)
    else:
        source = open_images(images.path)
        order = shuffled_images(len(source))
        border = round(0.8 * len(source))
        train, valid = source.of(order[:border]), source.of(order[border:])
    return *_pixels(train, vision), *_pixels(valid, vision)


def _pixels(source: ImageSource, vision: VisionConfig) -> tuple[npt.NDArray[Any], ...]:
    rows = [
        normalised(source.reader.read(int(at), vision.num_channels), vision).ravel()
        for at in source.positions
    ]
    return np.array(rows), source.labels


def linear_share(images: Images) -> float:
    """Return the share that a logistic regression of pixels has right.

    Its strength of regularisation is the best one for every fifth image of the training.
    """
    linear = import_module("sklearn.linear_model")
    train, classes, held_out, true = pixels_of(images)
    is_tried = np.arange(len(train)) % 5 == 0

    def fitted(strength: float, rows: npt.NDArray[np.bool_]) -> Any:
        model = linear.LogisticRegression(C=strength, max_iter=200)
        return model.fit(train[rows], classes[rows])

    scores = {
        strength: float(fitted(strength, ~is_tried).score(train[is_tried], classes[is_tried]))
        for strength in STRENGTHS
    }
    best = max(scores, key=scores.__getitem__)
    return float(fitted(best, np.ones(len(train), bool)).score(held_out, true))


def table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown: shares of held-out images that are right."""
    yield f"| images | {VIT}, each seed | {LINEAR} |"
    yield "|---|---|---|"
    for name, shares in found.items():
        seeds = ", ".join(f"{share:.1%}" for share in shares[VIT])
        yield f"| {name} | {seeds} | {shares[LINEAR][0]:.1%} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps that are not done yet, and print shares of right answers."""
    parser = argparse.ArgumentParser(prog="image_classes", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="where everything goes")
    add("--mnist", metavar="FILE", help="an images-idx3-ubyte file, with its labels beside it")
    add("--cifar", metavar="ZIP", help="CIFAR-10's images in class folders, in train and test")
    add("--mnist-iterations", type=int, default=2200, help="[%(default)s]")
    add("--cifar-iterations", type=int, default=600, help="[%(default)s]")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the training on CIFAR [1 2 3]")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    flags = parser.parse_args(argv)
    steps = Steps(flags.out)
    sets = sets_of(flags)
    found = {
        name: {VIT: trained(steps, name, images), LINEAR: [linear_share(images)]}
        for name, images in sets.items()
    }
    print("\n".join(["", *table(found)]))
    steps.write_report(
        flags.json,
        "image_classes",
        recipes={name: asdict(images.recipe) for name, images in sets.items()},
        found=found,
    )


if __name__ == "__main__":
    run_program(main)
