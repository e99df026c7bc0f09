"""Everything that only a GPU can show, in one command: `python benchmarks/gpu_suite.py --out DIR`.

Runs the tests that need CUDA, measures operators beside compiled PyTorch, then trains GPTs in bf16
and FP8 on random tokens, each part in a process of its own with a deadline. What could not be
measured is listed as such, all of it where there is no GPU. How to read the report is in
benchmarks/README.md.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.workload import Workload, matmul_peak_tflops, workload
from megatron import device
from megatron.config.fp8 import Fp8Recipe
from megatron.loop.report import PEAK_TFLOPS
from megatron.model.accounting import FLOPS_CONVENTION
from megatron.mpu.layers import FP8_BLOCKS
from megatron.ops.scaled_matmul import runs_on
from megatron.program import run_program

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 50304
MATMUL_SIZE = 8192
PROFILED_STEPS = 2
KERNELS_SHOWN = 15
SUITE_DEADLINE_S = 530.0  # of all parts together; below 9 minutes
TESTS_DEADLINE_S = 180.0
OPERATORS_DEADLINE_S = 90.0
TRAINING_DEADLINE_S = 80.0
SHORTEST_PART_S = 20.0  # no part is started with less time left
# One width of a 7B model, so that rows of all tokens of a micro-batch do not fit into a cache.
OPERATORS = ("--device", "cuda", "--dtypes", "bf16", "--rows", "16384", "--widths", "4096")
WHERE_OPTIONS_END = "--"
_AS_GRAPH = "as a CUDA graph"


@dataclass(frozen=True)
class Training:
    """One model to train, in bf16 or with a recipe of FP8."""

    preset: str
    micro_batch: int  # sized for 80 GB; the optimizer's state is 16 bytes per parameter
    steps: int
    recipe: Fp8Recipe | None = None
    layers: int | None = None  # of the preset's, where not all of them fit
    graph: bool = False  # the passes of a step are one CUDA graph

    @property
    def name(self) -> str:
        """The name of this part."""
        return f"training {self.model}, {self.precision}"

    @property
    def model(self) -> str:
        """The preset, how many of its layers, and whether the GPU has little to do at a time."""
        model = self.preset if self.layers is None else f"{self.layers} layers of {self.preset}"
        return f"{model} a sample at a time" if self.micro_batch == 1 else model

    @property
    def precision(self) -> str:
        """What products are computed in, and whether as a graph."""
        dtype = "bf16" if self.recipe is None else f"FP8 {self.recipe}"
        return f"{dtype} {_AS_GRAPH}" if self.graph else dtype

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of `pretrain_gpt.py` beside the preset's and those of every training."""
        flags: tuple[str, ...] = ("--cuda-graph",) if self.graph else ()
        if self.layers is not None:
            flags += ("--num-layers", str(self.layers))
        if self.recipe is None:
            return flags
        return (*flags, "--fp8-format", "hybrid", "--fp8-recipe", self.recipe.value)


# The most telling ones first: a slow machine may leave no time for the last.
_1B, _7B = ("gpt3-1.3b", 8, 12), ("llama-7b", 8, 12)
TRAININGS = (
    Training(*_1B),
    Training(*_7B, layers=8),
    Training(*_7B, Fp8Recipe.TENSORWISE, layers=8),
    Training(*_1B, Fp8Recipe.TENSORWISE),
    Training(*_7B, Fp8Recipe.ROWWISE, layers=8),
    Training("gpt3-125m", 1, 60),
    Training("gpt3-125m", 1, 60, graph=True),
    Training("gpt3-125m", 16, 30),
    Training("gpt3-125m", 16, 30, Fp8Recipe.TENSORWISE),
)


class Clock:
    """The time that is left of the whole suite."""

    def __init__(self, total_s: float = SUITE_DEADLINE_S) -> None:
        self._total_s, self._started = total_s, time.monotonic()

    def limit(self, deadline_s: float) -> float:
        """Return the seconds that a part with such a deadline may take; 0 if it must not start."""
        left = self._total_s - (time.monotonic() - self._started)
        return min(deadline_s, left) if left >= SHORTEST_PART_S else 0.0


def main(argv: Sequence[str] | None = None) -> None:
    """Run every part, print the report, write it if asked; failed tests are exit code 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index(WHERE_OPTIONS_END) if WHERE_OPTIONS_END in words else len(words)
    flags = _parser().parse_args(words[:cut])
    if flags.measure is not None:
        measured = measure(flags, more=words[cut + 1 :])
        flags.json.write_text(json.dumps(measured, indent=1))
        return
    report = run_suite(flags.peak_tflops)
    text = markdown(report)
    print(text)
    if flags.out is not None:
        _write(flags.out, report, text)
    if report["tests"] is not None and not report["tests"]["ok"]:
        raise SystemExit(1)


def run_suite(peak_tflops: float | None) -> dict[str, Any]:
    """Return the whole report; parts without a result are named under `not_measured`."""
    clock = Clock()
    parts = ["tests/gpu", "operators", *(one.name for one in TRAININGS)]
    report: dict[str, Any] = {
        "benchmark": "gpu_suite",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "torch": torch.__version__,
        "device": None,
        "flops_convention": FLOPS_CONVENTION,
        "tests": None,
        "operators": None,
        "trainings": [],
        "not_measured": [],
    }
    if not device.cuda_is_available():
        report["not_measured"] = [{"part": part, "why": "no CUDA device"} for part in parts]
        return report
    device.select("cuda")
    report["device"], capability = device.name(), device.capability()
    device.select("cpu")  # this process only waits: the parts have the memory for themselves
    _print_result("tests/gpu")
    report["tests"] = _run_tests()
    for ways in (("--compiled",), ()):  # without compiled PyTorch where that fails
        _print_result("operators")
        result = _measure_operators(ways, clock.limit(OPERATORS_DEADLINE_S))
        if "why" not in result:
            report["operators"] = result
            break
        report["not_measured"].append(result)
    for one in TRAININGS:
        _print_result(one.name)
        result = _why_not(one, capability) or _measure_training(
            one, peak_tflops, clock.limit(TRAINING_DEADLINE_S)
        )
        kind = "trainings" if "why" not in result else "not_measured"
        report[kind].append(result)
    return report


def measure(flags: argparse.Namespace, *, more: Sequence[str]) -> dict[str, Any]:
    """Train one preset in this process; `more` are flags that override it."""
    started = time.perf_counter()
    given = [
        *("--model-preset", flags.measure, "--micro-batch-size", str(flags.micro_batch)),
        *("--bf16", "--hidden-dropout", "0", "--attention-dropout", "0"),
        *("--lr", "1e-4", "--device", flags.device, "--log-level", "warning"),
        *more,
    ]
    with workload(given, vocab_size=VOCABULARY) as work:
        ready = time.perf_counter()
        reports, seconds = [], []
        for number in range(flags.warmup + flags.steps):
            text = work.tokens(number)
            device.synchronize()
            before = time.perf_counter()
            reports.append(work.step(text))
            device.synchronize()
            seconds.append(time.perf_counter() - before)
            if number > flags.warmup + 2 and time.perf_counter() - started > flags.budget_s:
                break
        peak_memory = device.peak_memory_bytes()  # before the profiler and the matmuls
        estimate = work.memory
        step_s = median(seconds[flags.warmup :])
        kernels = _kernels(work, step_s)
        achieved = work.tokens_per_step * work.flops_per_token / step_s / 1e12
        peak = flags.peak_tflops or _stated_peak(device.name())
        return {
            "part": f"training {flags.measure}",
            "precision": _precision_of(work),
            "flags": given,
            "device": device.name(),
            "parameters": sum(p.numel() for p in work.engine.stage.parameters()),
            "tokens_per_step": work.tokens_per_step,
            "steps": len(seconds) - flags.warmup,
            "median_step_s": step_s,
            "step_s": seconds[flags.warmup :],
            "tokens_per_second": work.tokens_per_step / step_s,
            "flops_per_token": work.flops_per_token,
            "model_tflops": achieved,
            "stated_peak_tflops": peak,
            "mfu": None if peak is None else achieved / peak,
            "matmul_peak_tflops": matmul_peak_tflops(torch.bfloat16, [flags.matmul_size]),
            "peak_memory_gib": peak_memory / 2**30,
            "estimated_memory_gib": estimate.total / 2**30,
            "estimated_bytes": asdict(estimate),
            "setup_s": ready - started,
            "first_loss": reports[0].loss,
            "last_loss": reports[-1].loss,
            "profile": kernels,
        }


def _precision_of(work: Workload) -> str:
    fp8 = work.build.fp8
    recipe = None if fp8 is None else fp8.fp8_recipe
    return Training("", 0, 0, recipe, graph=work.config.training.cuda_graph).precision


def markdown(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = [
        f"# GPU suite, {report['time']}",
        "",
        f"Device: {report['device'] or 'no CUDA device'}; torch {report['torch']}.",
        "",
    ]
    tests = report["tests"]
    if tests is not None:
        counts = ", ".join(f"{count} {word}" for word, count in tests["counts"].items())
        lines += [f"tests/gpu: {counts or tests['why']} in {tests['seconds']:.0f} s.", ""]
        lines += [f"- {line}" for line in tests["failures"]]
    if report["operators"] is not None:
        lines += _operator_lines(report["operators"])
    if report["trainings"]:
        lines += _summary_lines(report["trainings"])
        lines += ["", f"FLOPs: {report['flops_convention']}; attention counted in full.", ""]
    for one in report["trainings"]:
        lines += _training_lines(one)
    for missing in report["not_measured"]:
        lines.append(f"- not measured: {missing['part']} ({missing['why']})")
    return "\n".join(lines)


def _operator_lines(measured: dict[str, Any]) -> list[str]:
    lines = [
        f"## Operators, {measured['rows']} rows",
        "",
        "| operator | pass | width | ours us | compiled us | eager us | floor us | floor / ours |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in measured["results"]:
        compiled = f"{row['compiled_us']:.1f}" if "compiled_us" in row else "-"
        lines.append(
            f"| {row['operator']} | {row['pass']} | {row['width']} | {row['ours_us']:.1f} "
            f"| {compiled} | {row['eager_us']:.1f} | {row['copy_us']:.1f} "
            f"| {100 * row['copy_us'] / row['ours_us']:.0f}% |"
        )
    return [*lines, ""]


def _summary_lines(trainings: Sequence[dict[str, Any]]) -> list[str]:
    in_bf16 = {
        one["part"].rpartition(",")[0]: one for one in trainings if one["precision"] == "bf16"
    }
    lines = [
        "## Trainings",
        "",
        "| training | tokens/s | TFLOP/s | MFU | x bf16 | peak GiB | estimated GiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in trainings:
        mfu = "?" if one["mfu"] is None else f"{100 * one['mfu']:.1f}%"
        base = in_bf16.get(one["part"].rpartition(",")[0])
        times = "?" if base is None else f"{base['median_step_s'] / one['median_step_s']:.2f}"
        lines.append(
            f"| {one['part'].removeprefix('training ')} | {one['tokens_per_second']:.0f} "
            f"| {one['model_tflops']:.0f} | {mfu} | {times} | {one['peak_memory_gib']:.1f} "
            f"| {one['estimated_memory_gib']:.1f} |"
        )
    return lines


def _training_lines(one: dict[str, Any]) -> list[str]:
    mfu = "no stated peak for this device"
    if one["mfu"] is not None:
        mfu = f"{100 * one['mfu']:.1f}% of the stated {one['stated_peak_tflops']:.0f} TFLOP/s"
        mfu += "" if one["precision"].startswith("bf16") else " of bf16"
    measured = one["model_tflops"] / one["matmul_peak_tflops"]
    seen = one["profile"]
    return [
        f"## {one['part']} ({one['parameters'] / 1e6:.0f}M parameters)",
        "",
        f"- tokens/s: {one['tokens_per_second']:.0f} (median of {one['steps']} steps of "
        f"{one['tokens_per_step']} tokens, {1000 * one['median_step_s']:.1f} ms)",
        f"- MFU: {mfu}; {100 * measured:.1f}% of the {one['matmul_peak_tflops']:.0f} TFLOP/s that "
        "a square bf16 matmul reached here",
        f"- peak memory: {one['peak_memory_gib']:.1f} GiB, estimated "
        f"{one['estimated_memory_gib']:.1f} GiB",
        f"- loss {one['first_loss']:.4f} -> {one['last_loss']:.4f} on random tokens; "
        f"set-up {one['setup_s']:.0f} s",
        f"- kernels: {seen['total_ms_per_step']:.1f} ms per step under the profiler, "
        f"{100 * seen['share_of_step']:.0f}% of a step without it",
        "",
        "| ms/step | share | calls/step | kernel |",
        "|---:|---:|---:|---|",
        *(
            f"| {k['ms_per_step']:.3f} | {100 * k['share']:.1f}% | {k['calls_per_step']:.0f} "
            f"| `{k['name']}` |"
            for k in seen["top"]
        ),
        "",
    ]


def _kernels(work: Workload, step_s: float) -> dict[str, Any]:
    """Return the device time by kernel; on a CPU, by operator."""
    on_gpu = device.current().type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as seen:
        for number in range(PROFILED_STEPS):
            work.step(work.tokens(number))
        device.synchronize()
    rows = []
    for event in seen.key_averages():
        kind = str(event.device_type).rpartition(".")[2].lower()
        # A named range (the optimizer's step) would count its kernels twice.
        if kind == device.current().type and not getattr(event, "is_user_annotation", False):
            own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            rows.append((own / PROFILED_STEPS / 1000, event.count / PROFILED_STEPS, event.key))
    total = sum(row[0] for row in rows)
    return {
        "total_ms_per_step": total,
        "share_of_step": total / 1000 / step_s,
        "top": [
            {"name": name[:110], "ms_per_step": ms, "calls_per_step": calls, "share": ms / total}
            for ms, calls, name in sorted(rows, reverse=True)[:KERNELS_SHOWN]
        ],
    }


def _run_tests() -> dict[str, Any]:
    # Without the options of pyproject.toml: plugins that they need may be missing here.
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-o", "addopts=", "-rf", "-q"]
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TESTS_DEADLINE_S,
        )
        output, why = done.stdout, f"pytest ended with {done.returncode}"
        ok = done.returncode == 0
        print(output, file=sys.stderr)
        if done.returncode not in (0, 1):
            print(done.stderr, file=sys.stderr)
    except subprocess.TimeoutExpired:
        output, why, ok = "", f"not done within {TESTS_DEADLINE_S:.0f} s", False
    words = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", output)
    return {
        "ok": ok,
        "why": why,
        "counts": {word: int(count) for count, word in words},
        "failures": re.findall(r"^(?:FAILED|ERROR) .*", output, flags=re.MULTILINE),
        "seconds": time.monotonic() - started,
    }


def _why_not(one: Training, capability: tuple[int, int]) -> dict[str, Any]:
    """Return why a device cannot do a training; empty if it can."""
    if one.recipe is None or all(runs_on(each, capability) for each in FP8_BLOCKS[one.recipe]):
        return {}
    version = ".".join(map(str, capability))
    return {
        "part": one.name,
        "why": f"no products with scales {one.recipe} at compute capability {version}",
    }


def _measure_operators(ways: Sequence[str], limit_s: float) -> dict[str, Any]:
    part = " ".join(("operators", *ways))
    command = [sys.executable, str(ROOT / "benchmarks" / "ops.py"), *OPERATORS, *ways]
    return _measure_apart(part, command, limit_s)


def _measure_training(one: Training, peak_tflops: float | None, limit_s: float) -> dict[str, Any]:
    command = [
        *(sys.executable, str(Path(__file__).resolve()), "--measure", one.preset),
        *("--micro-batch", str(one.micro_batch), "--steps", str(one.steps)),
        # Half for set-up and steps; the rest for the profile.
        *("--budget-s", str(limit_s / 2)),
        *(("--peak-tflops", str(peak_tflops)) if peak_tflops is not None else ()),
    ]
    measured = _measure_apart(one.name, command, limit_s, more=[WHERE_OPTIONS_END, *one.flags])
    return measured | {"part": one.name}


def _measure_apart(
    part: str, command: Sequence[str], limit_s: float, *, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what a program writes with `--json`, or why it wrote nothing.

    It is a new process, so that peak memory and out-of-memory errors are separate.
    """
    missing = {"part": part}
    if not limit_s:
        return missing | {"why": f"no time left of {SUITE_DEADLINE_S:.0f} s for all parts"}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "measured.json"
        try:
            done = subprocess.run(
                [*command, "--json", str(found), *more],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return missing | {"why": f"not done within {limit_s:.0f} s"}
        if done.returncode != 0 or not found.exists():
            print(done.stderr, file=sys.stderr)
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            return missing | {"why": f"exit code {done.returncode}: {last[0][:300]}"}
        measured: dict[str, Any] = json.loads(found.read_text())
        return measured


def _write(folder: Path, report: dict[str, Any], text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"gpu_suite-{report['time'].replace(':', '')}"
    (folder / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / f"{stem}.md").write_text(text + "\n")


def _stated_peak(name: str) -> float | None:
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


def _print_result(part: str) -> None:
    print(f"--- {part} ...", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_suite", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="write a dated .json and .md there")
    add("--peak-tflops", type=float, help="stated bf16 peak, for a GPU that is not in our table")
    one = parser.add_argument_group(
        "one part in this process", "what follows -- are flags of pretrain_gpt.py"
    )
    one.add_argument("--measure", metavar="PRESET", help="train this preset")
    one.add_argument("--json", type=Path, metavar="FILE", help="where the numbers go")
    one.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="[cuda]")
    one.add_argument("--micro-batch", type=int, default=8, help="[8]")
    one.add_argument("--steps", type=int, default=20, help="measured steps [20]")
    one.add_argument("--warmup", type=int, default=3, help="steps before them [3]")
    one.add_argument("--budget-s", type=float, default=60.0, help="stop measuring then [60]")
    one.add_argument("--matmul-size", type=int, default=MATMUL_SIZE, help="[%(default)s]")
    return parser


if __name__ == "__main__":
    run_program(main)
