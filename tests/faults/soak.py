"""A run under the supervisor that random faults hit again and again, and its goodput.

`python -m tests.faults.soak --minutes 60` (or `make soak MINUTES=60`): once the run has done a new
step, and some seconds that are drawn at random have passed, a rank is killed or stopped, or the
newest checkpoint is damaged and a rank killed. At the end the run is told to stop; its weights have
to be those of a run without faults up to the same iteration, bit by bit.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.reliability.goodput_picture import draw
from megatron import log
from megatron.checkpoint.folder import run_folder
from megatron.peers.goodput import accounts_in
from tests.faults.grid import PROGRAM, ROOT, digest_of
from tests.faults.injection import NOTHING, STEPS, Plan, flip_a_bit
from tests.support.launch import Started, byte_corpus, small_run

RANKS, SAVE_INTERVAL = 2, 20
ACCOUNTS = "accounts"
NEVER = 10**7  # iterations
GOES_ON_WITHIN_S = 60.0
ENDS_WITHIN_S = 60.0
MEAN_S = 4.0  # between a new step and the next fault


class Soak(NamedTuple):
    """What came of a soak."""

    faults: Counter[str]
    iteration: int
    slowest_s: float  # from a fault to the next new step
    goodput: str
    problem: str


def _newest(folder: Path) -> Path | None:
    found = run_folder.saved_iterations(folder / "save")
    return folder / "save" / run_folder.iteration_name(max(found)) if len(found) > 1 else None


def _kill(folder: Path, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _stop(folder: Path, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def _damage_and_kill(folder: Path, pid: int) -> None:
    newest = _newest(folder)
    if newest is not None:
        shards = sorted(newest.glob("shard*"))
        if shards:
            flip_a_bit(shards[0])
    os.kill(pid, signal.SIGKILL)


FAULTS: dict[str, Callable[[Path, int], None]] = {
    "SIGKILL": _kill,
    "SIGSTOP": _stop,
    "newest checkpoint damaged, and SIGKILL": _damage_and_kill,
}
WEIGHTS = (4, 1, 1)  # of a stopped rank, waiting for its end is most of the time


def soak(
    place: Path,
    *,
    seconds: float,
    seed: int,
    say: Callable[[str], None],
    picture: Path | None = None,
) -> Soak:
    """Hit a run with faults for so long; draw its goodput, and return what came of it."""
    drawn, folder = random.Random(seed), place / "soak"
    corpus = byte_corpus(_made(place / "corpus"))
    faults: Counter[str] = Counter()
    slowest, until = 0.0, time.monotonic() + seconds
    with _started(_made(folder), corpus) as job:
        while True:
            waited = _wait_for_a_step(folder, job)
            if waited is None:
                return Soak(faults, 0, slowest, "", f"does not go on:\n{job.text[-2000:]}")
            slowest = max(slowest, waited if faults else 0.0)
            if time.monotonic() > until:
                break
            time.sleep(drawn.expovariate(1 / MEAN_S))
            (name,) = drawn.choices(list(FAULTS), WEIGHTS)
            pids = job.running(PROGRAM)
            if len(pids) != RANKS:
                return Soak(faults, 0, slowest, "", f"{len(pids)} ranks:\n{job.text[-2000:]}")
            faults[name] += 1
            (folder / STEPS).unlink()
            FAULTS[name](folder, drawn.choice(pids))
            say(f"{sum(faults.values()):4}  {name}")
        os.kill(job.process.pid, signal.SIGTERM)
        ended = job.ended(within_s=ENDS_WITHIN_S)
    if picture is not None:
        draw(accounts_in(str(folder / ACCOUNTS)), picture, ended=time.time())
    iteration = run_folder.latest_iteration(folder / "save")
    goodput = "".join(re.findall(r"goodput .*", ended.text)[-1:])
    say(f"stopped at iteration {iteration}; now a run without faults up to there")
    problem = "" if ended.status == 0 else f"exit code {ended.status}\n{ended.text[-2000:]}"
    reference = _made(place / "reference")
    with _started(reference, corpus, "--exit-interval", str(iteration)) as job:
        ended = job.ended(within_s=max(600.0, 2 * seconds))
    if not problem and digest_of(folder, iteration) != digest_of(reference, iteration):
        problem = f"weights differ from those of a run without faults\n{ended.text[-500:]}"
    return Soak(faults, iteration, slowest, goodput, problem)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _started(folder: Path, corpus: str, *more: str) -> Started:
    save = str(folder / "save")
    flags = small_run(
        corpus,
        *("--train-iters", str(NEVER), "--eval-iters", "0", "--log-interval", "1000"),
        *("--save", save, "--load", save, "--save-interval", str(SAVE_INTERVAL)),
        *("--keep-last", "3", "--load-fallback", "previous", *more),
    )
    words = [sys.executable, "-m", "megatron.supervise", "--nproc-per-node", str(RANKS)]
    plan = Plan(NOTHING, "", 0, str(folder))
    return Started(
        [*words, "--max-restarts", "20", "--accounts", ACCOUNTS, PROGRAM, *flags],
        cwd=folder,
        environment={"PYTHONPATH": str(ROOT)} | plan.variables(),
        fresh=True,
    )


def _wait_for_a_step(folder: Path, job: Started) -> float | None:
    """Return seconds until the run has planned a step after the last one was forgotten."""
    began = time.monotonic()
    while time.monotonic() - began < GOES_ON_WITHIN_S and job.process.poll() is None:
        path = folder / STEPS
        if path.exists() and _is_of(path, job.running(PROGRAM)):
            return time.monotonic() - began
        time.sleep(0.05)
    return None


def _is_of(path: Path, pids: Sequence[int]) -> bool:
    """Return whether a step of one of these processes is noted, which is not the first."""
    lines = path.read_text().splitlines()
    noted = [json.loads(line)[0] for line in lines if line.endswith("]")]
    return any(noted.count(pid) > 1 for pid in pids)


def main(argv: Sequence[str] | None = None) -> None:
    """Soak a run; exit code 1 if something was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the goodput there")
    flags = parser.parse_args(argv)
    log.configure(0, 1, level="error")
    with tempfile.TemporaryDirectory() as place:
        result = soak(
            Path(place),
            seconds=60 * flags.minutes,
            seed=flags.seed,
            say=lambda text: print(text, flush=True),
            picture=flags.png,
        )
        shutil.rmtree(place, ignore_errors=True)
        Path(place).mkdir()
    for name, count in result.faults.items():
        print(f"{count:5}  {name}")
    print(f"{sum(result.faults.values())} faults, iteration {result.iteration}, "
          f"slowest way back {result.slowest_s:.1f} s")  # fmt: skip
    print(result.goodput)
    print(result.problem or "weights are bit by bit those of a run without faults")
    sys.exit(1 if result.problem else 0)


if __name__ == "__main__":
    main()
