"""The cost of the guards that are on by default, while there is no fault.

`python -m benchmarks.reliability.guard_cost`: CPU seconds of each guard (`guard_worker.py`) over
those of the whole process, of two ranks that train, in several turns. Runs with and without guards
differ by more than the guards cost, and are not compared. What is not in it: waiting, which takes
no CPU, and start-up.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.machine import machine
from benchmarks.reliability.guard_worker import COMPARISONS, NOTES, PROCESS, THREADS, WARM_UP
from megatron.errors import MachineError
from megatron.launch import environment_of_rank, free_port

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
SHAPE = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-4 --mock-data --eval-iters 0 "
    "--tokenizer-type ByteTokenizer --log-interval 10000 --num-workers 0 --num-threads 1"
)
TOTAL = "all guards"
RUN_S = 600.0  # after which a run has failed


def seconds_of_run(flags: Sequence[str], iterations: int) -> Mapping[str, float]:
    """Return CPU seconds by guard, and of the whole, summed over two ranks that train.

    Raises:
        MachineError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        files = [Path(folder, f"guards-of-{rank}") for rank in range(RANKS)]
        words = [*SHAPE.split(), *flags, "--train-iters", str(WARM_UP + iterations)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.reliability.guard_worker", str(file), *words],
                env=environment_of_rank(rank, RANKS, port=port, accounts=folder),
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
            )
            for rank, file in enumerate(files)
        ]
        statuses = [rank.wait(RUN_S) for rank in ranks]
        if any(statuses):
            raise MachineError(
                "a run of the benchmark failed",
                found=f"exit codes {statuses}",
                fix="read its message above",
            )
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return {
        name: sum(each.get(name, 0.0) for each in found)
        for name in (*THREADS, NOTES, COMPARISONS, PROCESS)
    }


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each guard in the CPU seconds of the processes, and of all together."""
    found = {name: each / seconds[PROCESS] for name, each in seconds.items() if name != PROCESS}
    return {**found, TOTAL: sum(found.values())}


def main(argv: Sequence[str] | None = None) -> None:
    """Run in turns, and print the share of each guard: its median, and the least and the most."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=200)  # of which every 100th compares
    parser.add_argument("--json", help="a file for the result")
    flags = parser.parse_args(argv)
    turns = []
    for turn in range(flags.turns):
        seconds = seconds_of_run([], flags.iterations)
        turns.append(shares(seconds))
        a_step = 1e3 * seconds[PROCESS] / flags.iterations
        print(
            f"turn {turn + 1}: {100 * turns[-1][TOTAL]:.3f} % of {a_step:.1f} ms a step", flush=True
        )
    for name in turns[0]:
        values = [turn[name] for turn in turns]
        least, most = 100 * min(values), 100 * max(values)
        print(
            f"{name:26} {100 * median(values):7.3f} % of the CPU time ({least:.3f} to {most:.3f})"
        )
    if flags.json:
        result = {"machine": machine(), "iterations": flags.iterations, "shares": turns}
        Path(flags.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
