"""Show where the time of steps went and which communication was hidden, from --profile's traces."""

import argparse
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.atomic import publish_file, temporary_name
from megatron.errors import DataError
from megatron.loop.breakdown import CLASSES, Breakdown, breakdown, late_ranks
from megatron.loop.overlap import overlaps, read_trace
from megatron.program import run_program

_RANK = re.compile(r"rank\d+")


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table and a line for each group of every trace; name ranks that are late.

    Raises:
        DataError: a file is no trace, or has no step to draw.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="+", help="a .json.gz file of one rank")
    parser.add_argument("--picture", type=Path, help="draw the classes of each trace to this .png")
    args = parser.parse_args(argv)
    by_rank: dict[str, Breakdown] = {}
    for path in args.trace:
        events = read_trace(path)
        print(path)
        of_rank = breakdown(events)
        if of_rank.steps:
            by_rank[_label(path, by_rank)] = of_rank
            print("\n".join(f"  {line}" for line in of_rank.lines()))
        for group in overlaps(events):
            print(f"  {group}")
    for line in late_ranks(by_rank):
        print(line)
    if args.picture is not None:
        draw(by_rank, args.picture)


def draw(by_rank: Mapping[str, Breakdown], picture: Path) -> None:
    """Write `picture` (.png): a bar for each rank, cut by classes, in milliseconds a step.

    Raises:
        DataError: there is no step.
    """
    if not by_rank:
        raise DataError(
            "there is nothing to draw",
            found="no whole step in any of the traces",
            fix="give traces that --profile wrote at the end of its steps",
        )
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.45 * len(by_rank)), dpi=120)
    starts = [0.0] * len(by_rank)
    for number, kind in enumerate(CLASSES):
        widths = [1e3 * each.seconds[kind] / each.steps for each in by_rank.values()]
        if any(widths):
            axes.barh(list(by_rank), widths, left=starts, color=f"C{number}", label=kind)
            starts = [start + width for start, width in zip(starts, widths)]
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds of a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
    unfinished = temporary_name(picture)
    figure.savefig(unfinished, format="png")
    pyplot.close(figure)
    publish_file(unfinished, picture)


def _label(path: Path, taken: Mapping[str, Breakdown]) -> str:
    found = _RANK.match(path.name)
    name = found[0] if found else path.name
    return str(path) if name in taken else name


if __name__ == "__main__":
    run_program(main)
