"""Causal attention, forward and backward, beside PyTorch's and its FLOPs.

Contestants take turns in one process; medians are kept. The floor is the time of a square matrix
product of as many operations, in the same turns; a causal half of all pairs counts.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import machine
from benchmarks.ops import DTYPES, Turns
from megatron import device, host
from megatron.ops import library
from megatron.ops.attention import attend
from megatron.ops.cpu_memory import keep_tensors_together
from megatron.program import run_program

SQUARE = 1024  # rows and columns of the product that the floor is measured with


def measured(
    shape: tuple[int, int, int, int], dtype: torch.dtype, turns: Turns
) -> dict[str, float]:
    """Return milliseconds of each contestant and of the floor, for [b, a, s, d]."""
    drawn = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(shape, generator=drawn).to(turns.device, dtype).requires_grad_()
        for _ in range(4)
    )

    def both(function: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(q, k, v), (q, k, v), grad)

    eager = partial(F.scaled_dot_product_attention, is_causal=True)
    square = torch.randn(SQUARE, SQUARE, device=turns.device).to(dtype)
    took = turns.medians(
        {
            "ours": both(partial(attend, causal=True)),
            "eager": both(eager),
            "square": lambda: square @ square,
        }
    )
    batch, heads, length, width = shape
    # Two products forward and five backward, of two operations for half of all pairs.
    flops = 7 * batch * heads * length**2 * width
    took["floor"] = took.pop("square") * flops / (2 * SQUARE**3)
    return {name: seconds * 1e3 for name, seconds in took.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every length, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="of all sequences together")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512, 1024, 2048])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="channels of a head")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=21, help="measurements of each contestant")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="file that gets the figures")
    options = parser.parse_args(argv)
    host.keep_freed_memory()  # as a run does
    keep_tensors_together()
    turns = Turns(device.select(options.device, 0), options.rounds)
    where = {**machine(), "device": options.device, "instruction_set": library.INSTRUCTION_SET}
    print(", ".join(f"{key}: {value}" for key, value in where.items()))
    print("dtype length  ours ms  eager ms  floor ms  eager/ours")
    rows = []
    for name in options.dtypes:
        for length in options.lengths:
            batch = max(1, options.tokens // length)
            shape = (batch, options.heads, length, options.width)
            took = measured(shape, DTYPES[name], turns)
            rows.append({"dtype": name, "shape": shape, "ms": took})
            print(
                f"{name:<5} {length:>6} {took['ours']:>8.2f} {took['eager']:>9.2f} "
                f"{took['floor']:>9.2f} "
                f"{took['eager'] / took['ours']:>11.2f}"
            )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"machine": where, "results": rows}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_program(main)
