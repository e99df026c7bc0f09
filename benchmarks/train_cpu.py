"""Tokens/s of our training step beside a plain eager GPT of the same shape, on this CPU.

`python benchmarks/train_cpu.py [--shape gpt2|llama]`: both train from the same weights on the same
tokens, step by step in turn, so that whatever else the machine does falls on both. Each has a
process of its own, where its way to take and keep memory concerns nobody else. `--peers` adds
others. How to read what it prints is in benchmarks/README.md.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import machine
from benchmarks.peers.packages import (
    COMPILED,
    MEGATRON_CORE,
    TRANSFORMERS,
    Maker,
    compiled,
    megatron_core,
    plain,
    transformers,
)
from benchmarks.peers.plain_gpt import Bf16Style, LlamaShape, PlainTrainer, Recipe, Shape
from benchmarks.workload import matmul_peak_tflops, workload
from megatron.errors import ConfigError, MachineError, NumericsError
from megatron.host import peak_resident_bytes
from megatron.model.accounting import FLOPS_CONVENTION
from megatron.ops.cpu_products import fp32_library, take_faster_fp32_library
from megatron.program import run_program

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Same weights, same tokens, other order of summation. Relative, on a mean over many tokens.
# fp32: rounding is 1e-7. bf16: 8 bits of mantissa in every layer, of which the mean keeps little.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-4}
# The norm of the whole gradient, likewise before the first update.
NORM_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}
# By the last step the losses may have moved apart by this multiple: the optimizers agree too.
DRIFT = 10.0
# By the value of --shape; flags change their sizes.
SHAPES = {
    "gpt2": Shape(layers=8, hidden=512, heads=8, seq_length=512, vocab=50304, micro_batch=4),
    "llama": LlamaShape(
        layers=4,
        hidden=512,
        heads=8,
        groups=2,
        ffn=1408,
        seq_length=2048,
        vocab=32000,
        micro_batch=1,
    ),
}
SIZES = tuple(one.name for one in fields(LlamaShape))
PEAK_SIZES = (1024, 2048, 4096)
RECIPE = Recipe()
OURS, OURS_COMPILED, OURS_RECOMPUTING, PLAIN = "ours", "ours compiled", "ours recomput.", "plain"
MORE_FLAGS = {  # of each of ours
    OURS: (),
    OURS_COMPILED: ("--compile",),
    OURS_RECOMPUTING: (
        *("--recompute-granularity", "selective"),
        *("--recompute-modules", "act", "layernorm"),
    ),
}
PROFILE, MEMORY = "profile", "memory"
DEADLINE_S = 600.0  # of one answer, in which a peer may compile


@dataclass(frozen=True)
class Step:
    """The result of one step, and what it took; CPU seconds are those of all threads."""

    loss: float
    norm: float
    seconds: float
    cpu_seconds: float


@dataclass
class Contestant:
    """The steps of one of them."""

    name: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def add(self, step: Step) -> None:
        """Keep one more step."""
        self.seconds.append(step.seconds)
        self.cpu_seconds.append(step.cpu_seconds)
        self.losses.append(step.loss)
        self.norms.append(step.norm)


@dataclass(frozen=True)
class Entry:
    """What a process needs to know to make its contestant."""

    name: str
    dtype: str
    shape: Shape
    flags: argparse.Namespace
    weights: Path  # that ours writes and the others begin with


@dataclass(frozen=True)
class Score:
    """The measurements of one contestant, without warm-up."""

    tokens_per_second: float
    share_of_matmul_peak: float
    median_seconds: float
    median_cpu_seconds: float
    seconds: list[float]
    first_loss: float
    last_loss: float
    first_grad_norm: float


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each dtype, print a table, write JSON if asked."""
    flags = _parser().parse_args(argv)
    shape = shape_of(flags)
    _take_faster_fp32_library(shape)  # for the peak of products
    results = [measure(dtype, shape, flags) for dtype in flags.dtype]
    report = {
        "benchmark": "train_cpu",
        "machine": machine(),
        "network": flags.shape,
        "shape": asdict(shape),
        "recipe": asdict(RECIPE),
        "flops_convention": FLOPS_CONVENTION,
        "steps": flags.steps,
        "warmup": flags.warmup,
        "results": results,
    }
    print(table(report))
    if flags.json is not None:
        flags.json.parent.mkdir(parents=True, exist_ok=True)
        flags.json.write_text(json.dumps(report, indent=1) + "\n")


def shape_of(flags: argparse.Namespace) -> Shape:
    """Return the shape that the flags name, with the sizes that they change.

    Raises:
        ConfigError: a size that a GPT-2 does not have.
    """
    given = {name: getattr(flags, name) for name in SIZES if getattr(flags, name) is not None}
    shape = SHAPES[flags.shape]
    unread = [f"--{name} {value}" for name, value in given.items() if not hasattr(shape, name)]
    if unread:
        raise ConfigError(
            f"the shape {flags.shape} has no such sizes",
            found=" ".join(unread),
            fix="leave them out, or add --shape llama",
        )
    return replace(shape, **given)


def measure(dtype: str, shape: Shape, flags: argparse.Namespace) -> dict[str, Any]:
    """Return all contestants in one dtype, in turns."""
    bf16 = _bf16_style(dtype, flags)
    ours = [OURS]  # all from the same seed, so with the same weights
    ours += [OURS_COMPILED] if flags.compile else []
    ours += [OURS_RECOMPUTING] if flags.recompute else []
    all_of_them = [Contestant(name) for name in (*ours, *_makers(flags))]
    with ExitStack() as stack:
        weights = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "weights"
        processes: dict[str, Player] = {}
        for one in all_of_them:  # one after the other: the first writes the weights
            entry = Entry(one.name, dtype, shape, flags, weights)
            processes[one.name] = stack.enter_context(player(entry))
        peak = 0.0
        for number in range(flags.warmup + flags.steps):
            # Each finds the caches of the one before it, so the order changes.
            first = number % len(all_of_them)
            for contestant in (*all_of_them[first:], *all_of_them[:first]):
                contestant.add(Step(**processes[contestant.name].ask(number)))
            # Beside the steps, not before them: under load the peak sinks as the steps do.
            if number < 2 or number == flags.warmup + flags.steps - 1:
                peak = max(peak, matmul_peak_tflops(DTYPES[dtype], flags.peak_sizes, repeats=3))
        us, *others = all_of_them
        for other in others:
            check_equal_work(dtype, us, other)
        if flags.profile:
            for process in processes.values():
                process.ask(PROFILE)
        memory = {name: process.ask(MEMORY) for name, process in processes.items()}
        flops = processes[OURS].flops_per_token
        libraries = {name: process.fp32_library for name, process in processes.items()}
    scores = {
        one.name: asdict(_score(one, shape, flops, peak=peak, skip=flags.warmup))
        for one in all_of_them
    }
    return {
        "dtype": dtype,
        "plain_style": "fp32" if bf16 is None else f"bf16 {bf16.value}",
        "fp32_library": libraries,
        "matmul_peak_tflops": peak,
        "flops_per_token": flops,
        "loss_tolerance": TOLERANCE[dtype],
        "scores": scores,
        "beside": {other.name: _beside(us, other, skip=flags.warmup) for other in others},
        "peak_memory": memory,
    }


class Player:
    """The process of one contestant, which does a step when it is asked to."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.flops_per_token: int
        self.fp32_library: str
        self.flops_per_token, self.fp32_library = self._answer()

    def ask(self, request: int | str) -> Any:
        """Return the answer to a request: the number of a step, PROFILE or MEMORY."""
        self._pipe.send(request)
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(DEADLINE_S):
            raise MachineError(
                "a contestant does not answer",
                found=f"nothing within {DEADLINE_S:.0f} s",
                fix="look for what else the machine does, or take a smaller shape",
            )
        return self._pipe.recv()


@contextmanager
def player(entry: Entry) -> Iterator[Player]:
    """Start the process of a contestant; it ends with the block.

    A contestant that fails says so itself, and the program ends with its exit code.
    """
    spawn = multiprocessing.get_context("spawn")
    pipe, there = spawn.Pipe()
    process = spawn.Process(target=_play, args=(there, entry), daemon=True)
    process.start()
    there.close()
    try:
        yield Player(pipe)
    except EOFError:
        process.join()
        sys.exit(process.exitcode or 1)
    finally:
        pipe.close()  # on which the process ends
        process.join(DEADLINE_S)


def _play(pipe: Connection, entry: Entry) -> None:
    run_program(partial(_answer_all, pipe, entry))


def _answer_all(pipe: Connection, entry: Entry) -> None:
    """Do what is asked of a contestant, until nobody can ask any more."""
    imports = peak_resident_bytes()
    with _step_of(entry) as (step, flops):
        pipe.send((flops, fp32_library()))
        while True:
            try:
                request = pipe.recv()
            except EOFError:
                return
            if request == MEMORY:
                pipe.send({"imports": imports, "peak": peak_resident_bytes()})
            elif request == PROFILE:
                _print_profile(entry.name, lambda: step(_tokens(entry.shape, 0)))
                pipe.send(None)
            else:
                text = _tokens(entry.shape, request)
                wall, cpu = time.perf_counter(), time.process_time()
                loss, norm = step(text)
                took = time.perf_counter() - wall, time.process_time() - cpu
                pipe.send(asdict(Step(loss, norm, *took)))


@contextmanager
def _step_of(entry: Entry) -> Iterator[tuple[Callable[[Tensor], tuple[float, float]], int]]:
    """Yield what does a step on tokens and returns loss and norm, and FLOPs of a token (or 0)."""
    if entry.name in MORE_FLAGS:
        given = [*our_flags(entry.dtype, entry.shape), *MORE_FLAGS[entry.name]]
        with workload(given, vocab_size=entry.shape.vocab) as ours:
            if entry.name == OURS:
                named = ours.engine.stage.named_parameters()
                save_file({name: weight.detach() for name, weight in named}, entry.weights)

            def step(text: Tensor) -> tuple[float, float]:
                report = ours.step(text)
                return report.loss, report.grad_norm

            yield step, ours.flops_per_token
        return
    if entry.flags.same_library:
        _take_faster_fp32_library(entry.shape)
    begin = load_file(entry.weights)
    peer = _makers(entry.flags)[entry.name](begin.items(), entry.shape)
    del begin
    bf16 = _bf16_style(entry.dtype, entry.flags)
    yield PlainTrainer(peer.model, RECIPE, bf16=bf16, loss=peer.loss).step, 0


def _take_faster_fp32_library(shape: Shape) -> None:
    """Multiply fp32 in this process as a training of ours does, until it ends."""
    take_faster_fp32_library(
        tokens=shape.seq_length,
        hidden_size=shape.hidden,
        head_width=shape.hidden // shape.heads,
    )


def _tokens(shape: Shape, number: int) -> Tensor:
    """Return the random tokens [b, s + 1] of a step."""
    generator = torch.Generator().manual_seed(number)
    size = (shape.micro_batch, shape.seq_length + 1)
    return torch.randint(0, shape.vocab, size, generator=generator)


def table(report: dict[str, Any]) -> str:
    """Return the report as a table."""
    machine, shape = report["machine"], report["shape"]
    lines = [
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"load {machine['load_1min']:.1f} at the end",
        f"{report['network']}: "
        + ", ".join(f"{name} {value}" for name, value in shape.items())
        + f"; {report['steps']} steps in turns after {report['warmup']} for warm-up",
        "",
        "dtype  who            tokens/s  of matmul peak  s/step  CPU s/step "
        " first loss   last loss",
    ]
    for result in report["results"]:
        dtype = result["dtype"]
        for who, s in result["scores"].items():
            lines.append(
                f"{dtype:<6} {who:<14} {s['tokens_per_second']:>8.1f} "
                f"{100 * s['share_of_matmul_peak']:>14.1f}% {s['median_seconds']:>7.3f} "
                f"{s['median_cpu_seconds']:>11.3f} {s['first_loss']:>11.6f} {s['last_loss']:>11.6f}"
            )
        for who, beside in result["beside"].items():
            low, high = beside["range"]
            lines.append(
                f"{dtype:<6} ours / {who} in tokens/s: {beside['ratio']:.3f} (median of pairs; "
                f"{low:.3f} to {high:.3f}), in CPU time {beside['cpu_ratio']:.3f}"
            )
        for who, peak in result["peak_memory"].items():
            lines.append(
                f"{dtype:<6} peak memory of {who}: {peak['peak'] / 1e6:.0f} MB, of which "
                f"{peak['imports'] / 1e6:.0f} MB before the model was made"
            )
        if dtype == "fp32":
            by = ", ".join(f"{who} {library}" for who, library in result["fp32_library"].items())
            lines.append(f"{dtype:<6} products by: {by}")
        lines.append(
            f"{dtype:<6} matmul peak {result['matmul_peak_tflops']:.3f} TFLOP/s; peers are "
            f"{result['plain_style']}"
        )
    return "\n".join(lines)


def _makers(flags: argparse.Namespace) -> dict[str, Maker]:
    makers: dict[str, Maker] = {PLAIN: plain}
    if flags.peers:
        makers |= {COMPILED: compiled, TRANSFORMERS: transformers}
        if flags.megatron_core is not None:
            makers[MEGATRON_CORE] = megatron_core(flags.megatron_core)
    return makers


def _bf16_style(dtype: str, flags: argparse.Namespace) -> Bf16Style | None:
    return Bf16Style(flags.plain_bf16) if dtype == "bf16" else None


def _beside(us: Contestant, other: Contestant, *, skip: int) -> dict[str, Any]:
    """Return by how much we are faster: medians over pairs of neighbouring steps."""
    ratios = [theirs / own for own, theirs in zip(us.seconds[skip:], other.seconds[skip:])]
    cpu = zip(us.cpu_seconds[skip:], other.cpu_seconds[skip:])
    return {
        "ratio": median(ratios),
        "range": [min(ratios), max(ratios)],
        "cpu_ratio": median(theirs / own for own, theirs in cpu),
    }


def check_equal_work(dtype: str, ours: Contestant, other: Contestant) -> None:
    """Check that both compute the same, so that their speeds can be compared."""
    for what, our_value, other_value, tolerance in (
        ("first loss", ours.losses[0], other.losses[0], TOLERANCE[dtype]),
        ("first gradient norm", ours.norms[0], other.norms[0], NORM_TOLERANCE[dtype]),
        ("last loss", ours.losses[-1], other.losses[-1], DRIFT * TOLERANCE[dtype]),
    ):
        # Negated, so that NaN is refused too.
        if not abs(our_value - other_value) <= tolerance * abs(other_value):
            raise NumericsError(
                f"the two contestants do not compute the same {what}",
                found=f"{dtype}: {ours.name} {our_value:.7f}, {other.name} {other_value:.7f}, "
                f"relative tolerance {tolerance:g}",
                fix="make both models compute the same before comparing how fast they are",
            )


def _score(one: Contestant, shape: Shape, flops: int, *, peak: float, skip: int) -> Score:
    seconds = median(one.seconds[skip:])
    return Score(
        tokens_per_second=shape.tokens / seconds,
        share_of_matmul_peak=shape.tokens * flops / seconds / 1e12 / peak,
        median_seconds=seconds,
        median_cpu_seconds=median(one.cpu_seconds[skip:]),
        seconds=one.seconds[skip:],
        first_loss=one.losses[0],
        last_loss=one.losses[-1],
        first_grad_norm=one.norms[0],
    )


def our_flags(dtype: str, shape: Shape) -> list[str]:
    """Return the flags of our GPT of this shape."""
    sizes: dict[str, object] = {
        "num-layers": shape.layers,
        "hidden-size": shape.hidden,
        "num-attention-heads": shape.heads,
        "seq-length": shape.seq_length,
        "micro-batch-size": shape.micro_batch,
        "make-vocab-size-divisible-by": 1,
        "hidden-dropout": 0,
        "attention-dropout": 0,
        "lr": RECIPE.learning_rate,
        "weight-decay": RECIPE.weight_decay,
        "adam-beta1": RECIPE.betas[0],
        "adam-beta2": RECIPE.betas[1],
        "adam-eps": RECIPE.eps,
        "clip-grad": RECIPE.clip_grad,
        "device": "cpu",
    }
    switches = ["--bf16"] if dtype == "bf16" else []
    if isinstance(shape, LlamaShape):
        sizes |= {
            "num-key-value-heads": shape.groups,
            "ffn-hidden-size": shape.ffn,
            "normalization": "RMSNorm",
            "position-embedding-type": "rope",
        }
        switches += ["--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    return [*flags, *switches]


def _print_profile(name: str, step: Callable[[], object]) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    print(f"--- one step of {name}, by operator")
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=18))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train_cpu", description=__doc__)
    add = parser.add_argument
    add("--dtype", nargs="+", choices=tuple(DTYPES), default=list(DTYPES), help="[both]")
    add("--steps", type=int, default=10, help="measured steps of each contestant [10]")
    add("--warmup", type=int, default=2, help="steps before them [2]")
    add("--shape", choices=tuple(SHAPES), default="gpt2", help="network and sizes [%(default)s]")
    for name in SIZES:
        sizes = [
            f"{key} {getattr(shape, name)}" for key, shape in SHAPES.items() if hasattr(shape, name)
        ]
        add(f"--{name.replace('_', '-')}", type=int, help=f"[{', '.join(sizes)}]")
    add(
        "--plain-bf16",
        choices=[style.value for style in Bf16Style],
        default=Bf16Style.MASTERS.value,
        help="how the plain GPT trains in bf16 [%(default)s]",
    )
    add("--compile", action="store_true", help="also ours with --compile")
    add("--recompute", action="store_true", help="also ours with cheap parts computed again")
    add("--peers", action="store_true", help="also others")
    add("--same-library", action="store_true", help="peers multiply fp32 by our library")
    add("--megatron-core", type=Path, metavar="FOLDER", help="its GPT too, with --peers")
    add("--peak-sizes", type=int, nargs="+", default=list(PEAK_SIZES), help="of square matmuls")
    add("--profile", action="store_true", help="also print where a step of each spends its time")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    return parser


if __name__ == "__main__":
    run_program(main)
