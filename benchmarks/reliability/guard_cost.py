"""The cost of the guards that are on by default: steps of two ranks with and without them.

`python -m benchmarks.reliability.guard_cost`: runs in turns, with all guards, with none, and with
none again. The ratio of the two kinds without guards says how much of the others is noise. Seconds
are those within steps, as the run itself accounts for them; the machine should be idle.
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
from megatron.errors import MachineError
from megatron.launch import environment_of_rank, free_port
from megatron.peers.activity import DATA, STEP
from megatron.peers.goodput import accounts_in

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
SHAPE = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-4 --mock-data --eval-iters 0 "
    "--tokenizer-type ByteTokenizer --log-interval 10000 --num-workers 0 --num-threads 1"
)
OFF = ("--stall-timeout", "0", "--check-agreement-interval", "0")
KINDS: Mapping[str, tuple[str, ...]] = {"guards": (), "none": OFF, "none again": OFF}
RUN_S = 600.0  # after which a run has failed


def seconds_of_step(flags: Sequence[str], iterations: int) -> float:
    """Return the mean seconds of a step of a run of two ranks.

    Raises:
        MachineError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *SHAPE.split(), *flags]
        ranks = [
            subprocess.Popen(
                [*words, "--train-iters", str(iterations)],
                env=environment_of_rank(rank, RANKS, port=port, accounts=folder),
                stdout=subprocess.DEVNULL,
            )
            for rank in range(RANKS)
        ]
        statuses = [rank.wait(RUN_S) for rank in ranks]
        if any(statuses):
            raise MachineError(
                "a run of the benchmark failed",
                found=f"exit codes {statuses}",
                fix="read its message above",
            )
        (account,) = accounts_in(folder)
    return (account.seconds[STEP] + account.seconds.get(DATA, 0.0)) / account.iteration


def main(argv: Sequence[str] | None = None) -> None:
    """Run in turns, and print the medians and their ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--json", help="a file for the result")
    flags = parser.parse_args(argv)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(flags.turns):
        for kind in (*KINDS,) if turn % 2 == 0 else (*KINDS,)[::-1]:
            seconds[kind].append(seconds_of_step(KINDS[kind], flags.iterations))
            print(f"turn {turn + 1}: {kind}: {1e3 * seconds[kind][-1]:.2f} ms a step", flush=True)
    medians = {kind: median(each) for kind, each in seconds.items()}
    for kind, value in medians.items():
        print(f"{kind:12} {1e3 * value:8.2f} ms, {value / medians['none']:.4f} of none")
    if flags.json:
        result = {"machine": machine(), "seconds": seconds, "medians": medians}
        Path(flags.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
