"""Draw the loss curves of a run, training and validation, from its TensorBoard events."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.atomic import publish_file, temporary_name
from megatron.errors import DataError
from megatron.program import run_program

TRAIN = "lm-loss-training/lm loss"
VALID = "lm-loss-validation/validation/lm loss validation"

Curve = tuple[list[int], list[float]]


def read_curves(folder: Path, tags: Sequence[str]) -> dict[str, Curve]:
    """Return the points of each tag over all event files in `folder`, sorted by iteration.

    Where a resumed run repeats an iteration, the newer point counts.

    Raises:
        DataError: if there are no events of the first tag.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points: dict[str, dict[int, float]] = {tag: {} for tag in tags}
    for file in sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for tag in set(tags) & set(events.Tags()["scalars"]):
            points[tag].update({event.step: event.value for event in events.Scalars(tag)})
    if not points[tags[0]]:
        raise DataError(
            "there are no loss values to draw",
            found=f"no {tags[0]!r} in {folder}",
            fix="give the folder that --tensorboard-dir named, after at least one iteration",
        )
    return {tag: (sorted(at), [at[step] for step in sorted(at)]) for tag, at in points.items()}


def draw(folder: Path, picture: Path, *, title: str) -> None:
    """Write `picture` (.png) with the training and validation loss in `folder`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = read_curves(folder, (TRAIN, VALID))
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    steps, losses = curves[TRAIN]
    axes.plot(steps, losses, color="#9db8d9", linewidth=0.8, label="training, each iteration")
    axes.plot(steps, _smoothed(losses), color="#1f4e8c", linewidth=1.8, label="training, smoothed")
    steps, losses = curves[VALID]
    if steps:
        axes.plot(steps, losses, "o-", color="#c0392b", linewidth=1.5, label="validation")
        axes.annotate(
            f"{losses[-1]:.2f}",
            (steps[-1], losses[-1]),
            textcoords="offset points",
            xytext=(0, 8),
            ha="center",
            color="#c0392b",
        )
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    unfinished = temporary_name(picture)
    figure.savefig(unfinished, format="png")
    pyplot.close(figure)
    publish_file(unfinished, picture)


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensorboard-dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("loss.png"))
    parser.add_argument("--title", default="loss")
    flags = parser.parse_args(argv)
    draw(flags.tensorboard_dir, flags.output, title=flags.title)
    print(f"wrote {flags.output}")


def _smoothed(losses: list[float], weight: float = 0.9) -> list[float]:
    """Return the exponential moving average that starts at the first value."""
    smooth, average = [], losses[0]
    for loss in losses:
        average = weight * average + (1 - weight) * loss
        smooth.append(average)
    return smooth


if __name__ == "__main__":
    run_program(main)
