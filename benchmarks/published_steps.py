"""The estimate of a plan beside published speeds of Megatron-LM, over many rows.

`efficiency`, the share of the peak that products reach, is fitted to no row that it is used for: of
each row it is the median of what the other rows of the table would need. What the tables do not say
is assumed, and printed: one sample in a micro-batch, the 1f1b schedule, and which flags were on.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine
from megatron.arguments import parse_args
from megatron.initialize import tokenizer_of
from megatron.planning.hardware import Hardware, Link
from megatron.planning.rehearsal import RankPlan, World, flops_of_model, rehearse
from megatron.planning.step_time import step_time
from pretrain_gpt import gpt_task


class Row(NamedTuple):
    """A line of a table, as it was published."""

    name: str
    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    ranks: int
    batch: int
    tflops: float  # of a GPU, by the formula of the table


class Table(NamedTuple):
    """Rows of one publication.

    `counts_recomputation`: whether its FLOPs are those with what is computed again.
    """

    source: str
    hardware: Hardware
    flags: tuple[str, ...]  # of all rows
    counts_recomputation: bool
    rows: tuple[Row, ...]


# Peaks, memory and NVLink by the vendor's data sheets, in one direction; a 200 Gbit/s (A100) or
# 400 Gbit/s (H100) adapter for each GPU. A small collective of eight ranks takes about 10
# microseconds within a node, which is seven messages; a few more for each switch of a network.
_LINKS: dict[str, Any] = {"efficiency": 1.0, "ranks_per_node": 8}
A100 = Hardware(
    peak_flops={"bf16": 312e12},
    memory_bandwidth=2.0e12,
    node=Link(bandwidth=300e9, latency=1.5e-6),
    network=Link(bandwidth=25e9, latency=5e-6),
    **_LINKS,
)
H100 = Hardware(
    peak_flops={"bf16": 989.4e12},
    memory_bandwidth=3.35e12,
    node=Link(bandwidth=450e9, latency=1.5e-6),
    network=Link(bandwidth=50e9, latency=5e-6),
    **_LINKS,
)
TABLES = (
    Table(
        "Narayanan et al. 2021 (arXiv 2104.04473), weak scaling",
        A100,
        (
            *("--seq-length", "2048", "--max-position-embeddings", "2048", "--vocab-size", "51199"),
            *("--recompute-granularity", "full", "--recompute-method", "uniform"),
        ),
        counts_recomputation=True,
        rows=(
            Row("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
            Row("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138),
            Row("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142),
            Row("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135),
            Row("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138),
        ),
    ),
    Table(
        "Megatron-Core 0.8.0, weak scaling in the README of Megatron-LM",
        H100,
        (
            *("--seq-length", "4096", "--max-position-embeddings", "4096"),
            *("--vocab-size", "131071", "--use-distributed-optimizer"),
            *("--overlap-grad-reduce", "--overlap-param-gather"),
        ),
        counts_recomputation=False,
        rows=(
            Row("1.7B", 16, 2048, 24, 1, 1, 48, 192, 408.8),
            Row("7.1B", 32, 4096, 30, 2, 1, 96, 192, 465.9),
            Row("16B", 48, 6144, 32, 4, 1, 192, 192, 489.1),
            Row("32B", 56, 7168, 48, 8, 1, 384, 192, 459.6),
            Row("70B", 64, 8192, 84, 8, 2, 768, 384, 419.7),
        ),
    ),
)


class Rehearsed(NamedTuple):
    """A row whose step was rehearsed, and the published seconds of it."""

    row: Row
    world: World
    plans: tuple[RankPlan, ...]
    seconds: float

    def estimate(self, hardware: Hardware, efficiency: float) -> float:
        """Return the estimated seconds of a step."""
        known = replace(hardware, efficiency=efficiency)
        return step_time(self.world, self.plans, known).total

    def needed_efficiency(self, hardware: Hardware) -> float:
        """Return the efficiency at which the estimate is the published time, or 1 at most."""
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            too_slow = self.estimate(hardware, middle) > self.seconds
            low, high = (middle, high) if too_slow else (low, middle)
        return high


def main(argv: Sequence[str] | None = None) -> None:
    """Rehearse every row and print estimates, published times and errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--rows", type=int, help="the first rows of each table only")
    options = parser.parse_args(argv)
    found = [compared(table, options.rows) for table in TABLES]
    for table in found:
        print(table["source"])
        print(f"{'model':>8}{'GPUs':>6}{'published':>11}{'estimate':>10}{'error':>8}{'needs':>7}")
        for row in table["rows"]:
            print(
                f"{row['model']:>8}{row['ranks']:>6}{row['published_seconds']:>10.3f}s"
                f"{row['estimated_seconds']:>9.3f}s{row['error']:>8.1%}"
                f"{row['needed_efficiency']:>7.3f}"
            )
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "tables": found}, indent=1))


def compared(table: Table, rows: int | None = None) -> dict[str, Any]:
    """Return estimates, errors and needed efficiencies of the (first) rows of a table."""
    steps = [rehearsed_row(table, row) for row in table.rows[:rows]]
    needed = [step.needed_efficiency(table.hardware) for step in steps]
    found = []
    for at, step in enumerate(steps):
        used = statistics.median(needed[:at] + needed[at + 1 :])
        estimate = step.estimate(table.hardware, used)
        found.append(
            {
                "model": step.row.name,
                "ranks": step.row.ranks,
                "published_seconds": step.seconds,
                "efficiency_of_other_rows": used,
                "estimated_seconds": estimate,
                "error": estimate / step.seconds - 1,
                "needed_efficiency": needed[at],
            }
        )
    return {"source": table.source, "rows": found}


def rehearsed_row(table: Table, row: Row) -> Rehearsed:
    """Return a row with what its ranks compute and send, and the seconds of its step."""
    sequence_parallel = ("--sequence-parallel",) if row.tp > 1 and table.hardware is H100 else ()
    config = parse_args(
        [
            *table.flags,
            *sequence_parallel,
            *("--num-layers", str(row.layers), "--hidden-size", str(row.hidden)),
            *("--num-attention-heads", str(row.heads), "--bf16", "--micro-batch-size", "1"),
            *("--global-batch-size", str(row.batch), "--train-iters", "1", "--lr", "1e-4"),
            *("--tensor-model-parallel-size", str(row.tp), "--data-path", "none"),
            *("--pipeline-model-parallel-size", str(row.pp), "--tokenizer-type", "NullTokenizer"),
        ]
    )
    world = World.of(config, gpt_task(), tokenizer_of(config), row.ranks)
    flops = flops_of_model(world)[1 if table.counts_recomputation else 0]
    tokens = row.batch * config.data.seq_length
    seconds = flops * tokens / (row.tflops * 1e12 * row.ranks)
    return Rehearsed(row, world, rehearse(world, world.representatives()), seconds)


if __name__ == "__main__":
    main()
