"""Bytes of a training step by component: the estimate beside what the step allocates, on this CPU.

`python benchmarks/memory_table.py`: trains a few steps at the shape of train_cpu.py, counts the
tensors that are alive together, and reads the resident memory of the process. Flags after `--` are
those of the training programs. How to read what it prints is in benchmarks/README.md.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import machine
from benchmarks.peers.plain_gpt import Shape
from benchmarks.train_cpu import DTYPES, our_flags
from benchmarks.workload import workload
from megatron.host import peak_resident_bytes
from megatron.model.accounting import MemoryEstimate
from megatron.program import run_program

# That of train_cpu.py with two samples; flags after `--` change it.
SHAPE = Shape(layers=8, hidden=512, heads=8, seq_length=512, vocab=50304, micro_batch=2)
WARMUP = 2  # steps, after which whatever is kept is there
_ALLOCATION = "[memory]"  # the profiler's name of one


@dataclass(frozen=True)
class Measured:
    """Bytes of one training: estimated, alive together in a step, and resident."""

    estimate: MemoryEstimate
    kept: int  # weights, gradients and the optimizer's state
    alive: int  # the most of all other tensors in a step, with the memory of logits that is kept
    imports: int  # resident before the model was made
    peak: int  # resident


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each dtype, print a table, write JSON if asked."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    flags = _parser().parse_args(words[:cut])
    found = measure(our_flags(flags.dtype, SHAPE) + words[cut + 1 :], vocab_size=SHAPE.vocab)
    print(table(found))
    if flags.json is not None:
        report: dict[str, Any] = {"benchmark": "memory_table", "machine": machine()}
        report |= {"shape": asdict(SHAPE), "dtype": flags.dtype, "flags": words[cut + 1 :]}
        flags.json.write_text(json.dumps(report | asdict(found), indent=1) + "\n")


def measure(flags: Sequence[str], *, vocab_size: int) -> Measured:
    """Train a GPT of these flags for a few steps, and count its bytes."""
    imports = peak_resident_bytes()
    with workload(flags, vocab_size=vocab_size) as work:
        for number in range(WARMUP):
            work.step(work.tokens(number))
        peak = peak_resident_bytes()  # before the profiler takes memory of its own
        alive = peak_of_step(lambda: work.step(work.tokens(WARMUP)))
        kept: list[Tensor] = [*work.engine.optimizer.kept()]
        for parameter in work.engine.stage.parameters():
            kept += (parameter, parameter.main_grad)  # type: ignore[attr-defined]
        return Measured(
            estimate=work.memory,
            kept=sum(tensor.nbytes for tensor in kept),
            alive=alive + work.build.loss_state.kept_bytes,
            imports=imports,
            peak=peak,
        )


def peak_of_step(step: Callable[[], object]) -> int:
    """Return the most bytes that tensors made by `step` take together, as the profiler counts."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [
        event for event in seen.profiler.kineto_results.events() if event.name() == _ALLOCATION
    ]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()  # negative where memory is freed
        most = max(most, now)
    return most


def table(found: Measured) -> str:
    """Return the bytes as a table."""
    estimate = found.estimate
    state = estimate.total - estimate.activations
    tensors = found.kept + found.alive
    rest = found.peak - found.imports - tensors
    lines: list[tuple[str, int | None, int | None]] = [
        ("weights", estimate.weights, None),
        ("gradients", estimate.gradients, None),
        ("optimizer", estimate.optimizer, None),
        ("these three", state, found.kept),
        ("activations and loss", estimate.activations, found.alive),
        ("all tensors", estimate.total, tensors),
        ("Python and its imports", None, found.imports),
        ("buffers of libraries, code, holes", None, rest),
        ("resident memory at its peak", None, found.peak),
    ]
    text = [f"{'':<34}{'estimate':>10}{'measured':>10}"]
    text += [f"{name:<34}{_shown(one):>10}{_shown(other):>10}" for name, one, other in lines]
    text.append(f"estimate / measured, of all tensors: {estimate.total / tensors:.3f}")
    return "\n".join(text)


def _shown(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:.1f} MB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="memory_table", description=__doc__)
    add = parser.add_argument
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="[%(default)s]")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    return parser


if __name__ == "__main__":
    run_program(main)
