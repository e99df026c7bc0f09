"""Every fault in every phase of a run of two ranks under the supervisor.

`python -m tests.faults.grid` (or `make test-faults`) runs one cell after the other. A run goes on
by itself, or ends with the exit code of its error and goes on when it is started again, on files
that are whole again. In both cases its last checkpoint has the bytes of a run without a fault, no
process is left and no half of a save. `--write` keeps the table in docs/reliability.md.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import xxhash

from megatron import log
from megatron.checkpoint.folder.run_folder import iteration_name
from megatron.errors import CheckpointError, DataError, NumericsError
from tests.faults import memory_group
from tests.faults.injection import (
    EVALUATION,
    FIRED,
    FOR_MEMORY,
    IN_WORKERS,
    LOCAL,
    MEMORY,
    NETWORK,
    PHASES,
    RESTART,
    SAVE,
    SAVED,
    START,
    STEP,
    STEPS,
    WITH_LOCAL,
    Plan,
)
from tests.support.launch import Ended, Started, byte_corpus, small_run, unfinished
from tests.support.pages import write_between

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
MARKS = ("<!-- grid: written by `make test-faults WRITE=1` -->", "<!-- grid: end -->")
PROGRAM = str(Path(__file__).with_name("program.py"))
ITERATIONS, RANKS = 40, 2
DEADLINE_S = 90.0  # of one start; a cell that takes longer hangs
COLLECTIVES_S = 12.0  # --distributed-timeout-minutes
BUG = 1
# Words before those of a command: its loopback interface is nobody else's.
IN_OWN_NETWORK = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


class Expected(NamedTuple):
    """The end of a cell.

    Attributes:
        within_s: from the fault to the next new step, or to the end.
        statuses: exit codes of the supervisor; 0: the run goes on by itself.
        says: what is in the output, as a regular expression.
    """

    within_s: float
    statuses: tuple[int, ...] = (0,)
    says: str = ""


class Cell(NamedTuple):
    """A fault in a phase of a rank, and what has to come of it."""

    fault: str
    phase: str
    rank: int
    expected: Expected

    def __str__(self) -> str:
        return f"{self.fault}, {self.phase}, rank {self.rank}"


class Result(NamedTuple):
    """What came of a cell."""

    cell: Cell
    seconds: float | None
    problem: str  # empty: what was expected


AGAIN_S, STOPPED_S, TIMEOUT_S, ENDS_S = 8.0, 15.0, COLLECTIVES_S + 18, 10.0
KILLED = Expected(AGAIN_S, says="was ended by SIGKILL")
STOPPED = Expected(STOPPED_S, says=r"is stopped \(SIGSTOP\)|no sign of life|has ended without")
STUCK = Expected(TIMEOUT_S)
SHOWN = STUCK._replace(says=r"rank 1 was here:\nPython code[\s\S]* in _hold_the_lock\n")
A_BUG = Expected(ENDS_S, (BUG,), "ZeroDivisionError: a bug")
OF_SAVE = Expected(ENDS_S, (CheckpointError.exit_code,), "by a defect of this program; ZeroDivi")
TOLD = Expected(ENDS_S, says="was received; exiting program")
# Before the loop listens to it, a signal ends a process as it always does.
TOLD_EARLY = Expected(AGAIN_S, (0, 128 + 15, 128 + 10), "")
OF_DATA = Expected(ENDS_S, (DataError.exit_code,), "the corpus|corpus_text_document")


def left_out() -> Mapping[str, str]:
    """Return the faults that cannot be put in here, and what each needs."""
    needs = {
        NETWORK: (_has_namespaces(), "the programs unshare and ip"),
        FOR_MEMORY: (memory_group.parent_of_groups(), "a cgroup that can limit memory"),
    }
    return {fault: f"root and {need}" for fault, (is_here, need) in needs.items() if not is_here}


def cells() -> Iterator[Cell]:
    """Yield all cells but those that are left out."""
    missing = left_out()
    return (cell for cell in _cells() if cell.fault not in missing)


def _cells() -> Iterator[Cell]:
    for phase, rank in product(PHASES, (0, 1)):
        yield Cell("SIGKILL", phase, rank, KILLED)
        at_start = phase in (START, RESTART)
        stopped = STUCK if at_start else STOPPED
        yield Cell("SIGSTOP", phase, rank, stopped._replace(says=""))
    for phase in PHASES:
        told = TOLD_EARLY if phase in (START, RESTART) else TOLD
        yield Cell("SIGTERM", phase, 1, told)
        yield Cell("SIGUSR1", phase, 0, told)
        yield Cell("exception", phase, 1, OF_SAVE if phase == SAVE else A_BUG)
        yield Cell("hang", phase, 1, STUCK)
        yield Cell("interpreter lock held", phase, 1, SHOWN)
        out = Expected(ENDS_S, says="memory ran out")
        yield Cell("out of memory", phase, 1, out)
        yield Cell(FOR_MEMORY, phase, 1, KILLED._replace(says=f"{KILLED.says}{_counted()}"))
        yield Cell("clock jumps", phase, 0, Expected(60.0))
    for fault, phase in product(
        ("corpus truncated", "bit of the corpus flipped", "corpus replaced"),
        (START, STEP, EVALUATION, RESTART),
    ):
        yield Cell(fault, phase, 0, OF_DATA)
    for phase in (START, STEP, EVALUATION, RESTART):
        yield Cell("corpus removed", phase, 0, OF_DATA)
    for fault, rank in product(("no space left", "input/output error"), (0, 1)):
        failed = Expected(
            ENDS_S, (CheckpointError.exit_code,), "failed while writing the checkpoint"
        )
        yield Cell(fault, SAVE, rank, failed)
    for fault in (
        "bit of the checkpoint flipped",
        "checkpoint truncated",
        "shard removed",
        "manifest removed",
        "checkpoint removed",
        "tracker garbled",
        "bit of the index cache flipped",
        "index cache truncated",
        "index cache removed",
    ):
        yield Cell(fault, RESTART, 0, Expected(AGAIN_S))
    for phase, at in ((STEP, 24), (SAVE, 16), (EVALUATION, 16), (RESTART, 24)):
        local = KILLED._replace(says=f"from the local checkpoint of iteration {at}")
        yield Cell("SIGKILL with local checkpoints", phase, 1, local)
    failed = Expected(ENDS_S, (CheckpointError.exit_code,), "while writing the local checkpoint")
    yield Cell("no space left for a local checkpoint", SAVE, 1, failed)
    damaged = "local checkpoints are passed over(.|\n)*expected xxh3"
    for fault, says in (
        ("bit of a local checkpoint flipped", damaged),
        ("local checkpoint removed", "no local checkpoint is there of all ranks"),
    ):
        yield Cell(fault, RESTART, 0, Expected(AGAIN_S, says=says))
    for phase in (STEP, SAVE, EVALUATION):
        differ = Expected(60.0, (NumericsError.exit_code,), "replicas hold|ranks hold")
        yield Cell("bit of a parameter flipped", phase, 1, differ)
    for rank in (0, 1):
        nan = Expected(ENDS_S, (NumericsError.exit_code,), "is not finite")
        yield Cell("gradient is NaN", STEP, rank, nan)
    for phase in (STEP, SAVE, EVALUATION):
        yield Cell(NETWORK, phase, 1, Expected(60.0))
    for fault, phase in product(IN_WORKERS, (STEP, EVALUATION)):
        bug = fault == "data worker raises"
        yield Cell(fault, phase, 1, A_BUG if bug else STUCK)


def _counted() -> str:
    """Return the supervisor's words where the group of a killed rank is within its own (v1)."""
    parent = memory_group.parent_of_groups()
    is_v1 = parent is not None and (parent / "memory.oom_control").exists()
    return ": killed by the kernel because memory ran out" if is_v1 else ""


def _has_namespaces() -> bool:
    """Return whether this process may give a run a network of its own: root may."""
    return os.geteuid() == 0 and all(map(shutil.which, ("unshare", "ip")))


def flags_of(corpus: str, folder: Path, cell: Cell | None) -> list[str]:
    """Return the flags of the run of a cell."""
    save = str(folder / "save")
    in_worker = cell is not None and cell.fault in IN_WORKERS
    local = ()
    if cell is not None and cell.fault in WITH_LOCAL:
        memory = ("--non-persistent-local-ckpt-dir", str(folder / MEMORY))
        local = ("--non-persistent-save-interval", str(LOCAL), *memory)
    return small_run(
        corpus,
        *("--train-iters", str(ITERATIONS), "--lr-decay-iters", str(ITERATIONS)),
        *("--save", save, "--load", save, "--save-interval", str(SAVED), "--keep-last", "9"),
        *("--load-fallback", "previous", "--eval-interval", str(2 * SAVED), "--eval-iters", "2"),
        *("--log-interval", "10", "--check-agreement-interval", "10"),
        *("--distributed-timeout-minutes", str(COLLECTIVES_S / 60)),
        *("--num-workers", str(int(in_worker))),
        *local,
    )


def started(folder: Path, corpus: str, plan: Plan | None, cell: Cell | None) -> Started:
    """Start the supervisor of a run, with a fault or without one."""
    program = str(ROOT / "pretrain_gpt.py") if plan is None else PROGRAM
    words = [sys.executable, "-m", "megatron.supervise", "--nproc-per-node", str(RANKS)]
    if cell is not None and cell.fault == NETWORK:
        words = [*IN_OWN_NETWORK, *words]
    variables = {"PYTHONPATH": str(ROOT)} | ({} if plan is None else plan.variables())
    return Started(
        [*words, program, *flags_of(corpus, folder, cell)],
        cwd=folder,
        environment=variables,
        fresh=True,
    )


def run(
    place: Path, cell: Cell, original: Path, expected_digest: str, *, times: float = 1.0
) -> Result:
    """Run a cell in a folder of its own."""
    folder = place / re.sub(r"\W+", "-", str(cell))
    shutil.copytree(original, folder / "corpus")
    corpus = str(folder / "corpus" / "corpus_text_document")
    plan = Plan(cell.fault, cell.phase, cell.rank, str(folder))
    is_limited = cell.fault == FOR_MEMORY
    group = memory_group.limited_group(folder) if is_limited else nullcontext()
    with group, started(folder, corpus, plan, cell) as job:
        try:
            ended = job.ended(within_s=DEADLINE_S)
        except AssertionError as error:
            return Result(cell, None, f"hangs: {str(error)[-600:]}")
        ended_at = time.time()
    problem = "".join(_problems(folder, cell, ended))
    seconds = _seconds(folder, ended_at)
    if not problem and seconds is not None and seconds > times * cell.expected.within_s:
        problem = f"took {seconds:.1f} s; at most {cell.expected.within_s:.0f} s are stated"
    if not problem:
        problem = _goes_on(folder, corpus, original, expected_digest)
    if not problem:
        shutil.rmtree(folder)
    return Result(cell, seconds, problem)


def _problems(folder: Path, cell: Cell, ended: Ended) -> Iterator[str]:
    if not (folder / FIRED).exists():
        yield f"the fault did not happen: exit code {ended.status}\n{ended.text[-1500:]}"
    elif ended.status not in cell.expected.statuses:
        expected = " or ".join(map(str, cell.expected.statuses))
        yield f"exit code {ended.status}, not {expected}\n{ended.text[-1500:]}"
    elif not re.search(cell.expected.says, ended.text):
        yield f"does not say {cell.expected.says!r}\n{ended.text[-1500:]}"
    if left := _processes_of(folder):
        yield f"processes are left: {left}"


def _seconds(folder: Path, ended_at: float) -> float | None:
    """Return seconds from the fault to the first step of the next start, or to the end."""
    mark = folder / FIRED
    if not mark.exists():
        return None
    fired = float(mark.read_text())
    lines = (folder / STEPS).read_text().splitlines() if (folder / STEPS).exists() else []
    steps = [json.loads(line) for line in lines]
    before = {pid for pid, _, at in steps if at <= fired}
    again = next((at for pid, _, at in steps if at > fired and pid not in before), None)
    return (again or ended_at) - fired


def _goes_on(folder: Path, corpus: str, original: Path, expected_digest: str) -> str:
    """Start the run again on whole files; return what is wrong with its last checkpoint."""
    by_itself = digest(folder) == expected_digest
    if not by_itself:
        shutil.rmtree(folder / "corpus")
        shutil.copytree(original, folder / "corpus")
        with started(folder, corpus, None, None) as job:
            try:
                ended = job.ended(within_s=DEADLINE_S)
            except AssertionError as error:
                return f"hangs when it is started again: {str(error)[-600:]}"
        if ended.status:
            return f"does not go on: exit code {ended.status}\n{ended.text[-1500:]}"
    if digest(folder) != expected_digest:
        return "its last checkpoint differs from that of a run without a fault"
    if halves := unfinished(folder / "save"):
        return f"halves of saves are left: {halves}"
    if by_itself and (folder / MEMORY).exists():
        return "local checkpoints are left in memory"
    return ""


def digest(folder: Path) -> str:
    """Return a digest of the weights and the optimizer's state at the end; empty without them."""
    return digest_of(folder, ITERATIONS)


def digest_of(folder: Path, iteration: int) -> str:
    """Return the same of one iteration."""
    shards = sorted((folder / "save" / iteration_name(iteration)).glob("shard*"))
    hashed = xxhash.xxh3_128()
    for shard in shards:
        hashed.update(shard.read_bytes())
    return hashed.hexdigest() if shards else ""


def _processes_of(folder: Path) -> list[int]:
    """Return processes that have the folder in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in text and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def run_all(
    place: Path,
    chosen: Sequence[Cell],
    say: Callable[[str], None],
    *,
    times: float = 1.0,
    jobs: int = 1,
) -> list[Result]:
    """Run cells, `jobs` at a time, after a run without a fault."""
    original, reference = place / "corpus", place / "reference"
    original.mkdir()
    byte_corpus(original)
    shutil.copytree(original, reference / "corpus")
    with started(reference, str(reference / "corpus" / "corpus_text_document"), None, None) as job:
        ended = job.ended(within_s=DEADLINE_S)
    assert ended.status == 0, ended.text
    expected_digest = digest(reference)

    def run_and_print(cell: Cell) -> Result:
        result = run(place, cell, original, expected_digest, times=times)
        took = "" if result.seconds is None else f" {result.seconds:.1f} s"
        say(f"{'BAD' if result.problem else 'ok':4}{took:>8}  {cell}\n{result.problem}".rstrip())
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run_and_print, chosen))


def table(results: Sequence[Result]) -> list[str]:
    """Return the table of the page: faults by phases, with what came of each and its seconds."""
    by_fault: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        by_fault.setdefault(result.cell.fault, {}).setdefault(result.cell.phase, []).append(result)
    lines = [f"| fault | {' | '.join(PHASES)} |", f"|---|{'---|' * len(PHASES)}"]
    for fault, by_phase in by_fault.items():
        entries = [_entry(by_phase.get(phase, [])) for phase in PHASES]
        lines.append(f"| {fault} | {' | '.join(entries)} |")
    return lines


def _entry(results: Sequence[Result]) -> str:
    if not results:
        return ""
    if any(result.problem for result in results):
        return "BAD"
    slowest = max(result.seconds or 0.0 for result in results)
    statuses = results[0].cell.expected.statuses
    how = "goes on" if 0 in statuses else f"ends {statuses[-1]}"
    return f"{how}, {slowest:.1f} s"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cells that the flags select; exit code 1 if one is bad."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cells with this word in their name")
    parser.add_argument(
        "--times", type=float, default=1.0, help="stated seconds times this, on a busy machine"
    )
    parser.add_argument("--jobs", type=int, default=1, help="cells that run side by side")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {PAGE.name}")
    flags = parser.parse_args(argv)
    chosen = [cell for cell in cells() if flags.only in str(cell)]
    log.configure(0, 1, level="error")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        say = partial(print, flush=True)
        results = run_all(Path(place), chosen, say, times=flags.times, jobs=flags.jobs)
    bad = [result for result in results if result.problem]
    beside = f", {flags.jobs} side by side" if flags.jobs > 1 else ""
    took = f"{len(results)} cells in {(time.monotonic() - began) / 60:.1f} minutes{beside}"
    for fault, need in left_out().items():
        print(f"left out: {fault!r}, which needs {need}")
    print("\n".join(["", *table(results), "", f"{took}, {len(bad)} bad"]))
    if flags.write:
        write_between(PAGE, [*table(results), "", f"{took}, on {os.cpu_count()} cores."], MARKS)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
