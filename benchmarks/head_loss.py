"""Time and memory of the projection to the vocabulary with loss and both gradients, on this CPU.

`python benchmarks/head_loss.py`: torch's separate operations, ours, and the fused one, in turn in
one process. How to read what it prints is in benchmarks/README.md.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import machine
from megatron.errors import NumericsError
from megatron.host import peak_resident_bytes, resident_bytes
from megatron.mpu import linear_cross_entropy as fused_module
from megatron.mpu.context import ParallelContext
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.linear_cross_entropy import chunk_rows, linear_cross_entropy
from megatron.program import run_program

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Relative to the largest value of each: sums in another order, and in bf16 a rounding or two.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
ALONE = ParallelContext.single()


class Inputs(NamedTuple):
    """What all contestants are given: hidden states, the projection and labels."""

    hidden: Tensor  # [n, 1, h], requires a gradient
    weight: Tensor  # [v, h], requires a gradient
    labels: Tensor  # [n, 1]


Loss = Callable[[Inputs], Tensor]


@dataclass
class Contestant:
    """A way to compute the loss, and its measurements."""

    name: str
    step: Callable[[Inputs], Tensor]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None  # None: the system does not say

    def take(self, inputs: Inputs) -> None:
        """Do one step and measure it; CPU seconds are those of all threads."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.step(inputs)
        self.seconds.append(time.perf_counter() - wall)
        self.cpu_seconds.append(time.process_time() - cpu)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each dtype, print a table, write JSON if asked."""
    flags = _parser().parse_args(argv)
    report = {
        "benchmark": "head_loss",
        "tokens": flags.tokens,
        "hidden": flags.hidden,
        "vocab": flags.vocab,
        "chunk": {
            name: chunk_rows(flags.tokens, (flags.vocab, flags.hidden), dtype.itemsize, "cpu")
            for name, dtype in DTYPES.items()
        },
        "rounds": flags.rounds,
        "results": [measure(dtype, flags) for dtype in flags.dtype],
        "machine": machine(),
    }
    print(table(report))
    if flags.json is not None:
        flags.json.parent.mkdir(parents=True, exist_ok=True)
        flags.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(dtype: str, flags: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of all contestants in one dtype, in turns."""
    inputs = make_inputs(DTYPES[dtype], flags)
    contestants = [
        contestant("plain", plain_loss),
        contestant("separate", _separate),
        contestant("fused", _fused),
        *(
            Contestant(f"fused, {size} tokens", partial(_with_chunks, size))
            for size in flags.chunk_tokens
        ),
        Contestant("products", _products),
    ]
    check_equal_work(dtype, contestants[:-1], inputs)
    for one in contestants:
        inputs.hidden.grad = inputs.weight.grad = None  # so that the new ones count
        one.peak_bytes = peak_bytes(partial(one.step, inputs))
    for number in range(flags.warmup + flags.rounds):
        for one in contestants if number % 2 == 0 else contestants[::-1]:
            one.take(inputs)
    plain = contestants[0].seconds[flags.warmup :]
    return {
        "dtype": dtype,
        "rows": [
            {
                "who": one.name,
                "median_seconds": median(one.seconds[flags.warmup :]),
                "median_cpu_seconds": median(one.cpu_seconds[flags.warmup :]),
                "ratio": median(a / b for a, b in zip(plain, one.seconds[flags.warmup :])),
                "seconds": one.seconds[flags.warmup :],
                "peak_bytes": one.peak_bytes,
            }
            for one in contestants
        ],
    }


def make_inputs(dtype: torch.dtype, flags: argparse.Namespace) -> Inputs:
    """Return random inputs, the same for every contestant."""
    drawn = torch.Generator().manual_seed(1)
    hidden = torch.randn(flags.tokens, 1, flags.hidden, generator=drawn)
    weight = 0.02 * torch.randn(flags.vocab, flags.hidden, generator=drawn)
    labels = torch.randint(0, flags.vocab, (flags.tokens, 1), generator=drawn)
    return Inputs(hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels)


def contestant(name: str, loss: Loss) -> Contestant:
    """Return a contestant that computes a loss and both gradients."""
    return Contestant(name, partial(_with_gradients, loss))


def plain_loss(inputs: Inputs) -> Tensor:
    """Return the loss by torch's operations, one after the other."""
    logits = F.linear(inputs.hidden, inputs.weight).flatten(0, 1)
    return F.cross_entropy(logits.float(), inputs.labels.flatten(), reduction="sum")


def check_equal_work(dtype: str, contestants: Sequence[Contestant], inputs: Inputs) -> None:
    """Check that all compute the same loss and gradients, so that they can be compared."""
    expected: list[Tensor] = []
    for candidate in contestants:
        total = candidate.step(inputs)
        found = [total, *(one.grad for one in inputs[:2] if one.grad is not None)]
        expected = expected or found
        for what, one, other in zip(
            ("loss", "gradient", "gradient of the weight"), found, expected
        ):
            apart = float((one - other).abs().max() / other.abs().max())
            if not apart <= TOLERANCE[dtype]:  # negated, so that NaN is refused too
                raise NumericsError(
                    f"the contestants do not compute the same {what}",
                    found=f"{dtype}: {candidate.name} differs from {contestants[0].name} by "
                    f"{apart:.1e} of the largest value, {TOLERANCE[dtype]:g} allowed",
                    fix="make both compute the same before comparing how fast they are",
                )


def peak_bytes(step: Callable[[], Tensor]) -> int | None:
    """Return by how much the resident memory rises during a step; None: the system does not say."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = resident_bytes("VmRSS")
        step()
        return peak_resident_bytes() - before
    except OSError:
        return None


def table(report: dict[str, Any]) -> str:
    """Return the report as a table."""
    machine = report["machine"]
    lines = [
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"load {machine['load_1min']:.1f} at the end",
        f"{report['tokens']} tokens, hidden {report['hidden']}, vocab {report['vocab']}; fused in "
        f"chunks of at most {max(report['chunk'].values())} tokens; medians of "
        f"{report['rounds']} steps in turns",
        "",
        f"{'dtype':<6} {'who':<20} {'s':>8} {'CPU s':>8} {'plain / it':>10} {'peak MB':>8}",
    ]
    for result in report["results"]:
        for row in result["rows"]:
            peak = "?" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"
            lines.append(
                f"{result['dtype']:<6} {row['who']:<20} {row['median_seconds']:>8.4f} "
                f"{row['median_cpu_seconds']:>8.4f} {row['ratio']:>10.3f} {peak:>8}"
            )
    return "\n".join(lines)


def _with_gradients(loss: Loss, inputs: Inputs) -> Tensor:
    inputs.hidden.grad = inputs.weight.grad = None
    total = loss(inputs)
    total.backward()  # type: ignore[no-untyped-call]
    return total.detach()


def _separate(inputs: Inputs) -> Tensor:
    logits = F.linear(inputs.hidden, inputs.weight)
    vocab = inputs.weight.shape[0]
    losses = vocab_parallel_cross_entropy(logits, inputs.labels, ctx=ALONE, true_vocab_size=vocab)
    return losses.sum()


def _fused(inputs: Inputs) -> Tensor:
    return linear_cross_entropy(*inputs, None, ctx=ALONE, true_vocab_size=inputs.weight.shape[0])


def _with_chunks(size: int, inputs: Inputs) -> Tensor:
    """Do a step of the fused loss with so many tokens at a time."""
    fused_module.chunk_rows = lambda rows, *_, **__: min(rows, size)
    try:
        return _with_gradients(_fused, inputs)
    finally:
        fused_module.chunk_rows = chunk_rows


@torch.no_grad()
def _products(inputs: Inputs) -> Tensor:
    """Compute the three matrix products alone: a floor."""
    hidden = inputs.hidden.flatten(0, 1)
    logits = hidden @ inputs.weight.t()
    inputs.hidden.grad = (logits @ inputs.weight).view_as(inputs.hidden)
    inputs.weight.grad = logits.t() @ hidden
    return logits


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="head_loss", description=__doc__)
    add = parser.add_argument
    add("--dtype", nargs="+", choices=tuple(DTYPES), default=list(DTYPES), help="[both]")
    add("--tokens", type=int, default=1024, help="[1024]")
    add("--hidden", type=int, default=512, help="[512]")
    add("--vocab", type=int, default=50304, help="[50304]")
    add("--chunk-tokens", type=int, nargs="*", default=[], help="other sizes of chunks to measure")
    add("--rounds", type=int, default=7, help="measured steps of each [7]")
    add("--warmup", type=int, default=2, help="steps before them [2]")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    return parser


if __name__ == "__main__":
    run_program(main)
