"""Memory of a training step against the length of sequences, on 1, 2 and 4 ranks that share them.

`python benchmarks/memory/context_parallel.py --png FILE`: counts the tensors that a rank makes in a
step and has alive together, without weights, gradients and optimizer state, which every rank has
whole. Nothing is timed. How to read what it prints is in benchmarks/README.md.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.machine import machine
from benchmarks.parallel_cpu import start_ranks
from benchmarks.peers.plain_gpt import Shape
from benchmarks.train_cpu import our_flags
from megatron.program import run_program

WORKER = Path(__file__).with_name("context_parallel_worker.py")
SHAPE = Shape(layers=2, hidden=256, heads=4, seq_length=4096, vocab=1024, micro_batch=1)
LENGTHS = (4096, 8192, 16384, 32768)
SIZES = (1, 2, 4)

Bytes = Mapping[str, Mapping[int, Mapping[int, int]]]  # by exchange, ranks and length


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every length on every number of ranks, print a table, draw and write it if asked."""
    flags = _parser().parse_args(argv)
    found: Bytes = {
        exchange: {
            size: {length: peak(exchange, size, length) for length in flags.lengths}
            for size in flags.sizes
        }
        for exchange in flags.exchanges
    }
    print(table(found))
    if flags.png is not None:
        draw(found, flags.png)
    if flags.json is not None:
        report: dict[str, Any] = {"benchmark": "memory/context_parallel", "machine": machine()}
        report |= {"shape": asdict(SHAPE), "dtype": "fp32", "bytes": found}
        flags.json.write_text(json.dumps(report, indent=1) + "\n")


def peak(exchange: str, size: int, length: int) -> int:
    """Return the most bytes that one of `size` ranks has alive in a step, beside what it keeps."""
    given = our_flags("fp32", replace(SHAPE, seq_length=length))
    given += ["--context-parallel-size", str(size), "--cp-comm-type", exchange]
    given += ["--max-position-embeddings", str(length), "--num-threads", "1"]
    with ExitStack() as stack, ThreadPoolExecutor(size) as pool:
        asked = [
            pool.submit(worker.ask, "peak", flags=given, vocab_size=SHAPE.vocab)
            for worker in start_ranks(stack, WORKER, size)
        ]
        return max(int(one.result()["bytes"]) for one in asked)


def table(found: Bytes) -> str:
    """Return the bytes as a table, with those of one rank over those of several."""
    lines = []
    for exchange, by_size in found.items():
        lengths = list(next(iter(by_size.values())))
        head = "".join(f"{length:>20,}" for length in lengths)
        lines.append(f"{exchange + ', ranks':<18}{head}")
        alone = by_size.get(1)
        for size, by_length in by_size.items():
            cells = []
            for length, count in by_length.items():
                share = f" ({count / alone[length]:.3f})" if alone else ""
                cells.append(f"{count / 2**20:.1f} MiB{share}".rjust(20))
            lines.append(f"{size:<18}{''.join(cells)}")
    return "\n".join(lines)


def draw(found: Bytes, picture: Path) -> None:
    """Write `picture` (.png): memory against length, a line for each number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    styles = dict(zip(found, ("-", "--", ":")))
    for exchange, by_size in found.items():
        for at, (size, by_length) in enumerate(by_size.items()):
            axes.plot(
                list(by_length),
                [count / 2**20 for count in by_length.values()],
                styles[exchange],
                color=f"C{at}",
                marker="o",
                label=f"{size} rank{'s' if size > 1 else ''}, {exchange}",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("MiB of a rank in a step, beside weights and state")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="context_parallel", description=__doc__)
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a sequence")
    add("--sizes", type=int, nargs="+", default=SIZES, help="ranks that share a sequence")
    kinds = ("p2p", "all_gather", "a2a")
    add("--exchanges", nargs="+", choices=kinds, default=("p2p",), help="[p2p]")
    add("--png", type=Path, metavar="FILE", help="draw it there")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    return parser


if __name__ == "__main__":
    run_program(main)
