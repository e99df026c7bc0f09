"""Show how a pipeline schedule fills its stages: a timeline as text or picture, bubble and memory.

Nothing is trained: the schedule is simulated, with the communication that a run would do.
"""

import argparse
import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.atomic import publish_file, temporary_name, write_error
from megatron.errors import ConfigError
from megatron.pipeline.action import ActionKind
from megatron.pipeline.schedule import ScheduleName, pipeline_problems
from megatron.pipeline.simulate import Durations, Simulation, StageTrace, Work, simulate_schedule
from megatron.pipeline.theory import bubble_share, peak_activations
from megatron.program import run_program

LETTERS = {
    ActionKind.FORWARD: "F",
    ActionKind.BACKWARD: "B",
    ActionKind.BACKWARD_INPUT: "B",
    ActionKind.BACKWARD_WEIGHT: "W",
}
NARROWEST = 40
HALF = 0.5 + 1e-9  # rounds to the nearest column, with room for sums of durations
MOST_COLUMNS = 100_000  # of text before it is wrapped; durations of very unequal length

# Okabe and Ito's colours, which can be distinguished with colour blindness too; their brightness
# differs as well.
COLOURS = {"F": "#56B4E9", "B": "#E69F00", "W": "#009E73"}
MEANINGS = {"F": "forward", "B": "backward", "W": "weight gradient"}
SMALLEST_POINTS = 4.0  # numbers that would be smaller are left out
PALEST = 0.65  # how much white is in the colour of the last chunk; the first has none


class SchedulePlot(NamedTuple):
    """The schedule to show, and the time of each action."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    durations: Durations  # of one chunk


def simulated(layout: SchedulePlot) -> Simulation:
    """Return one simulated step of all stages."""
    return simulate_schedule(
        layout.name,
        num_stages=layout.stages,
        num_microbatches=layout.microbatches,
        num_chunks=layout.chunks,
        durations=layout.durations,
    )


def timeline(layout: SchedulePlot, result: Simulation, *, width: int) -> Iterator[str]:
    """Yield the lines of the timeline, at most `width` wide: a row per stage, wrapped together."""
    unit, columns = _grid(layout, result)
    rows = [_row(stage, unit, columns, layout.chunks) for stage in result.stages]
    margin = len(f"stage {layout.stages - 1} ")
    room = max(1, (width - margin) // columns) * columns
    length = max(map(len, rows))
    for start in range(0, length, room):
        stop = min(length, start + room)
        if start:
            yield ""
        if length > room:
            yield f"from {start / columns * unit:.4g} to {stop / columns * unit:.4g} ms"
        for stage, row in enumerate(rows):
            cells = row[start:stop].ljust(stop - start, ".").rstrip()
            yield f"stage {stage}".ljust(margin) + cells


def summary(layout: SchedulePlot, result: Simulation) -> Iterator[str]:
    """Return bubble and memory, as simulated and by theory."""
    sizes = {
        "num_stages": layout.stages,
        "num_microbatches": layout.microbatches,
        "num_chunks": layout.chunks,
    }
    yield f"one step        {result.makespan:g} ms"
    share = bubble_share(layout.name, **sizes)
    yield f"bubble          {result.bubble_share:.2%} of the step; by theory {share:.2%}"
    if _beyond_theory(layout):
        yield f"                ({_beyond_theory(layout)})"
    peaks = [stage.peak_activations for stage in result.stages]
    yield f"peak activations, stage by stage    {_numbers(peaks)}"
    yield f"                  by theory         {_numbers(peak_activations(layout.name, **sizes))}"
    if layout.name == ScheduleName.ZERO_BUBBLE:
        whole = [stage.peak_before_input_gradient for stage in result.stages]
        yield f"  of them with all of their graph   {_numbers(whole)}"
    of = (
        "one micro-batch"
        if layout.chunks == 1
        else f"one micro-batch in 1 of {layout.chunks} chunks"
    )
    yield f"(a peak of 1: what {of} needs from its forward to its last backward)"


def draw(layout: SchedulePlot, result: Simulation, picture: Path) -> None:
    """Write `picture` (.png): a row per stage, a box per computation.

    Raises:
        MachineError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    boxes = sum(len(stage.work) for stage in result.stages) / layout.stages
    wide = min(40.0, max(8.0, 0.3 * boxes))
    figure, axes = pyplot.subplots(figsize=(wide, 1.4 + 0.5 * layout.stages), dpi=120)
    points = _font_size(layout, result, wide)
    for row, stage in enumerate(result.stages):
        for work in stage.work:
            _draw_box(axes, row, work, chunks=layout.chunks, points=points)
    axes.set(
        xlim=(0, result.makespan),
        ylim=(layout.stages - 0.4, -0.6),
        xlabel="ms",
        yticks=range(layout.stages),
        yticklabels=[f"stage {stage}" for stage in range(layout.stages)],
    )
    axes.set_title(
        f"{layout.name}: {layout.stages} stages, {layout.microbatches} micro-batches"
        + (f", {layout.chunks} chunks" if layout.chunks > 1 else "")
        + f"; bubble {result.bubble_share:.1%}",
        fontsize=11,
    )
    axes.set_facecolor("#f2f2f2")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(handles=_legend(layout), loc="lower center", ncol=8, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    unfinished = temporary_name(picture)
    try:
        figure.savefig(unfinished, format="png")
        publish_file(unfinished, picture)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise write_error(picture, error) from error
    finally:
        pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags, simulate, print and draw."""
    flags = _flags().parse_args(argv)
    layout = _layout(flags)
    result = simulated(layout)
    print(f"{layout.name}: {_sizes(layout)}")
    print(_key(layout))
    print()
    for line in timeline(layout, result, width=flags.width):
        print(line)
    print()
    for line in summary(layout, result):
        print(line)
    if flags.png is not None:
        draw(layout, result, flags.png)
        print(f"wrote {flags.png}")


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = (
        ("--pp", "--pipeline-model-parallel-size", 4, "pipeline stages"),
        ("--chunks", "--num-virtual-stages-per-pipeline-rank", 1, "virtual stages on each rank"),
    )
    for short, long, default, text in sizes:
        parser.add_argument(short, long, type=int, default=default, metavar="N", help=text)
    parser.add_argument(
        "--microbatches", type=int, default=8, metavar="N", help="micro-batches per step"
    )
    parser.add_argument(
        "--schedule",
        "--pipeline-schedule",
        default="1f1b",
        help=f"one of {', '.join(ScheduleName)}",
    )
    parser.add_argument(
        "--num-layers", type=int, metavar="N", help="to check that there are enough of them"
    )
    times = (
        ("forward", 1.0, "forward of one micro-batch through all of one stage"),
        ("backward-input", 1.0, "its input gradient"),
        ("backward-weight", 1.0, "its weight gradients; backward is both together"),
        ("communication", 0.0, "one message between stages"),
    )
    for name, default_ms, text in times:
        parser.add_argument(
            f"--{name}-ms", type=float, default=default_ms, metavar="MS", help=f"time of the {text}"
        )
    parser.add_argument("--width", type=int, default=100, help="columns of the timeline")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw a picture")
    return parser


def _layout(flags: argparse.Namespace) -> SchedulePlot:
    """Return the plot that the flags ask for.

    Raises:
        ConfigError: the schedule cannot run like that, or a number makes no sense.
    """
    for problem in pipeline_problems(
        flags.schedule,
        num_stages=flags.pp,
        num_microbatches=flags.microbatches,
        num_chunks=flags.chunks,
        num_layers=flags.num_layers,
    ):
        raise problem
    if flags.width < NARROWEST:
        raise ConfigError(
            "the text would be too narrow to read",
            found=f"--width {flags.width}",
            fix=f"use {NARROWEST} or more",
        )
    if flags.num_layers is not None and flags.num_layers < 1:
        raise ConfigError(
            "a model has no layers", found=f"--num-layers {flags.num_layers}", fix="use 1 or more"
        )
    times = {name: getattr(flags, f"{name}_ms") for name in Durations._fields}
    for name, time in times.items():
        lowest = "0 or more" if name == "communication" else "more than 0"
        if not math.isfinite(time) or time < 0 or (time == 0 and name != "communication"):
            raise ConfigError(
                "a duration makes no sense",
                found=f"--{name.replace('_', '-')}-ms {time:g}",
                fix=f"use a number of milliseconds, {lowest}",
            )
    # A chunk is a part of the stage; a message is as large as ever.
    shares = {name: 1 if name == "communication" else flags.chunks for name in times}
    durations = Durations(**{name: time / shares[name] for name, time in times.items()})
    return SchedulePlot(flags.schedule, flags.pp, flags.microbatches, flags.chunks, durations)


def _sizes(layout: SchedulePlot) -> str:
    found = f"{layout.stages} stages, {layout.microbatches} micro-batches"
    return found + (f", {layout.chunks} chunks" if layout.chunks > 1 else "")


def _key(layout: SchedulePlot) -> str:
    found = "F forward, B backward"
    if layout.name == ScheduleName.ZERO_BUBBLE:
        found = "F forward, B gradient of the input, W of the weights"
    found += "; number: micro-batch"
    if layout.chunks > 1:
        found += "; letter after it: chunk"
    return found + "; dots: waiting"


def _grid(layout: SchedulePlot, result: Simulation) -> tuple[float, int]:
    """Return the time of a cell and its columns, which fit the longest label."""
    longest = max(
        len(_label(work, layout.chunks)) for stage in result.stages for work in stage.work
    )
    shortest = min(work.stop - work.start for work in result.stages[0].work)
    cells = result.makespan / shortest
    if cells * (longest + 1) > MOST_COLUMNS:
        raise ConfigError(
            "the timeline would be too long to read",
            found=f"{cells:.0f} times the shortest action",
            fix="show fewer micro-batches, or durations that differ less",
        )
    return shortest, longest + 1


def _row(stage: StageTrace, unit: float, columns: int, chunks: int) -> str:
    """Return the cells of one stage: the label of each computation, padded with dashes."""
    row = ""
    for work in stage.work:
        # Not round(): from equal times to equal widths, wherever they begin.
        start, stop = (int(time / unit * columns + HALF) for time in (work.start, work.stop))
        row = row.ljust(start, ".") + _label(work, chunks).ljust(stop - start - 1, "-") + " "
    return row


def _label(work: Work, chunks: int) -> str:
    _, microbatch, chunk = work.action
    part = "" if chunks == 1 else (chr(ord("a") + chunk) if chunks <= 26 else f".{chunk}")
    return f"{LETTERS[work.action.kind]}{microbatch}{part}"


def _numbers(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def _beyond_theory(layout: SchedulePlot) -> str:
    """Return why the simulation may differ from the formula; empty if it may not."""
    times = layout.durations
    reasons = []
    if times.communication:
        reasons.append("theory has messages that take no time")
    if layout.name == ScheduleName.ZERO_BUBBLE and len(set(times[:3])) > 1:
        reasons.append("theory has F, B and W equally long")
    return "; ".join(reasons)


def _draw_box(axes: Any, row: int, work: Work, *, chunks: int, points: float) -> None:
    from matplotlib.patches import Rectangle

    letter = LETTERS[work.action.kind]
    axes.add_patch(
        Rectangle(
            (work.start, row - 0.4),
            work.stop - work.start,
            0.8,
            facecolor=_paler(COLOURS[letter], work.action.chunk, chunks),
            edgecolor="#f2f2f2",
            linewidth=0.6,
        )
    )
    if points < SMALLEST_POINTS:
        return
    axes.text(
        (work.start + work.stop) / 2,
        row,
        str(work.action.microbatch),
        ha="center",
        va="center",
        fontsize=points,
    )


def _paler(colour: str, chunk: int, chunks: int) -> str:
    """Return the colour of a chunk, mixed with more white for later chunks."""
    white = PALEST * chunk / max(1, chunks - 1)
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def _font_size(layout: SchedulePlot, result: Simulation, wide: float) -> float:
    """Return the size in points at which the widest number fits into the narrowest box."""
    shortest = min(work.stop - work.start for work in result.stages[0].work)
    inches = 0.88 * wide * shortest / result.makespan
    digits = len(str(layout.microbatches - 1))
    return min(9.0, 72 * inches / (0.75 * digits + 0.4))


def _legend(layout: SchedulePlot) -> list[Any]:
    from matplotlib.patches import Patch

    letters = "FBW" if layout.name == ScheduleName.ZERO_BUBBLE else "FB"
    meanings = MEANINGS | (
        {"B": "input gradient"} if layout.name == ScheduleName.ZERO_BUBBLE else {}
    )
    found = [Patch(facecolor=COLOURS[each], label=meanings[each]) for each in letters]
    if layout.chunks > 1:
        found += [
            Patch(facecolor=_paler("#777777", chunk, layout.chunks), label=f"chunk {chunk}")
            for chunk in range(layout.chunks)
        ]
    return found


if __name__ == "__main__":
    run_program(main)
