"""Everything that only a GPU can show, in one command: `python benchmarks/gpu_suite.py --out DIR`.

Runs the tests that need CUDA, then trains two GPTs in bf16 on random tokens, each in a process of
its own with a deadline. What could not be measured is listed as such, all of it where there is no
GPU. How to read the report is in benchmarks/README.md.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.workload import Workload, matmul_peak_tflops, workload
from megatron import device
from megatron.loop.report import PEAK_TFLOPS
from megatron.model.accounting import FLOPS_CONVENTION
from megatron.program import run_program

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 50304
MATMUL_SIZE = 8192
PROFILED_STEPS = 2
KERNELS_SHOWN = 15
TESTS_DEADLINE_S = 240.0
WHERE_OPTIONS_END = "--"


@dataclass(frozen=True)
class Training:
    """One model to train, and the time limit."""

    preset: str
    micro_batch: int  # sized for 80 GB; the optimizer's state is 16 bytes per parameter
    steps: int
    deadline_s: float


TRAININGS = (
    Training("gpt3-125m", micro_batch=16, steps=30, deadline_s=120.0),
    Training("gpt3-1.3b", micro_batch=8, steps=12, deadline_s=200.0),
)


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
    parts = ["tests/gpu", *(f"training {one.preset}" for one in TRAININGS)]
    report: dict[str, Any] = {
        "benchmark": "gpu_suite",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "torch": torch.__version__,
        "device": None,
        "flops_convention": FLOPS_CONVENTION,
        "tests": None,
        "trainings": [],
        "not_measured": [],
    }
    if not device.cuda_is_available():
        report["not_measured"] = [{"part": part, "why": "no CUDA device"} for part in parts]
        return report
    device.select("cuda")
    report["device"] = device.name()
    device.select("cpu")  # this process only waits: the parts have the memory for themselves
    _print_result("tests/gpu")
    report["tests"] = _run_tests()
    for one in TRAININGS:
        _print_result(f"training {one.preset}")
        result = _measure_apart(one, peak_tflops)
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
        step_s = median(seconds[flags.warmup :])
        kernels = _kernels(work, step_s)
        achieved = work.tokens_per_step * work.flops_per_token / step_s / 1e12
        peak = flags.peak_tflops or _stated_peak(device.name())
        return {
            "part": f"training {flags.measure}",
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
            "setup_s": ready - started,
            "first_loss": reports[0].loss,
            "last_loss": reports[-1].loss,
            "profile": kernels,
        }


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
    for one in report["trainings"]:
        lines += _training_lines(one)
    if report["trainings"]:
        lines += ["", f"FLOPs: {report['flops_convention']}; attention counted in full."]
    for missing in report["not_measured"]:
        lines.append(f"- not measured: {missing['part']} ({missing['why']})")
    return "\n".join(lines)


def _training_lines(one: dict[str, Any]) -> list[str]:
    mfu = "no stated peak for this device"
    if one["mfu"] is not None:
        mfu = f"{100 * one['mfu']:.1f}% of the stated {one['stated_peak_tflops']:.0f} TFLOP/s"
    measured = one["model_tflops"] / one["matmul_peak_tflops"]
    seen = one["profile"]
    return [
        f"## {one['part']} ({one['parameters'] / 1e6:.0f}M parameters, bf16)",
        "",
        f"- tokens/s: {one['tokens_per_second']:.0f} (median of {one['steps']} steps of "
        f"{one['tokens_per_step']} tokens, {1000 * one['median_step_s']:.1f} ms)",
        f"- MFU: {mfu}; {100 * measured:.1f}% of the {one['matmul_peak_tflops']:.0f} TFLOP/s that "
        "a square bf16 matmul reached here",
        f"- peak memory: {one['peak_memory_gib']:.1f} GiB",
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


def _measure_apart(one: Training, peak_tflops: float | None) -> dict[str, Any]:
    """Measure in a new process, so that peak memory and out-of-memory errors are separate."""
    missing = {"part": f"training {one.preset}"}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "measured.json"
        command = [
            *(sys.executable, str(Path(__file__).resolve()), "--measure", one.preset),
            *("--micro-batch", str(one.micro_batch), "--steps", str(one.steps)),
            # Half for set-up and steps; the rest for the profile.
            *("--budget-s", str(one.deadline_s / 2), "--json", str(found)),
            *(("--peak-tflops", str(peak_tflops)) if peak_tflops is not None else ()),
        ]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=one.deadline_s
            )
        except subprocess.TimeoutExpired:
            return missing | {"why": f"not done within {one.deadline_s:.0f} s"}
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
