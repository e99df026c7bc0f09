"""Parallelism on a CPU: two ranks of a thread each, against one process of two threads.

`python benchmarks/parallel_cpu.py`: data parallelism of ours in six ways, and torch's
DistributedDataParallel around a plain GPT of the same shape, from the same weights on the same
batches, in turns; then every other axis of ours. What is compared is each one's own ratio, so that
what two cores share (memory, clock) falls on both. How to read what it prints is in
benchmarks/README.md.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.data_turns import Row, Section, Target, ratio, row_of, table, take_turns
from benchmarks.data_worker import Answer, Worker
from benchmarks.machine import machine
from benchmarks.peers.plain_gpt import Shape
from benchmarks.train_cpu import Contestant, check_equal_work, our_flags
from megatron.errors import NumericsError
from megatron.launch import free_port
from megatron.program import run_program

RANKS = 2
WORKER = Path(__file__).with_name("parallel_worker.py")
BYTES = 4  # of a gradient and of a parameter in fp32
# As torch's DDP has it, in which buckets are of 25 MB.
BUCKET_ELEMENTS = 25 * 2**20 // BYTES
ALONE, PLAIN_ALONE, DDP = "ours, 1 process", "plain, 1 process", "plain, DDP"
_FULLY = ("--data-parallel-sharding-strategy", "optim_grads_params")
OURS: Mapping[str, tuple[str, ...]] = {
    "ours": (),
    "ours, overlap": ("--overlap-grad-reduce",),
    "ours, distributed": ("--use-distributed-optimizer",),
    "ours, distributed, overlap": (
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
    ),
    "ours, fully sharded": _FULLY,
    "ours, fully sharded, overlap": (*_FULLY, "--overlap-grad-reduce", "--overlap-param-gather"),
}
# Other axes than dp, each of two; a micro-batch is then the whole batch, as in one process.
_TP = ("--tensor-model-parallel-size", "2")
_PP, _CP = ("--pipeline-model-parallel-size", "2"), ("--context-parallel-size", "2")
AXES: Mapping[str, tuple[str, ...]] = {
    "tp": _TP,
    "tp, sp": (*_TP, "--sequence-parallel"),
    "pp, 1f1b": _PP,
    "pp, zero-bubble": (*_PP, "--pipeline-schedule", "zero-bubble"),
    "cp, p2p": _CP,
    "cp, all_gather": (*_CP, "--cp-comm-type", "all_gather"),
    "cp, a2a": (*_CP, "--cp-comm-type", "a2a"),
}
MICRO_BATCHES = 4  # of a step, where stages work at once
EXPERTS_ALONE = "experts, 1 process"
_EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear", "--openai-gelu"),
)
EXPERTS: Mapping[str, tuple[str, ...]] = {
    "experts, dp": _EXPERTS,
    "experts, ep": (*_EXPERTS, "--expert-model-parallel-size", "2"),
}
TARGETED = ("ours", "ours, overlap")  # those that do what DDP does
QUICK = Shape(layers=2, hidden=32, heads=2, seq_length=16, vocab=96, micro_batch=4)


@dataclass(frozen=True)
class Team:
    """Processes that take steps together, each on its part of every batch."""

    workers: tuple[Worker, ...]
    samples: int  # of a batch
    parameters: int

    def take(self, who: str, first: int, steps: int) -> Answer:
        """Run some steps of a contestant; return the time of the slowest rank and all CPU time."""
        answers = self._ask("take", who=who, first=first, steps=steps)
        # The plain model's loss is that of its own samples, of which all ranks have equally many.
        losses = [sum(found) / len(answers) for found in zip(*(a["losses"] for a in answers))]
        return {
            "wall": max(answer["wall"] for answer in answers) / steps,
            "cpu": sum(answer["cpu"] for answer in answers) / steps,
            "losses": losses,
            "norms": answers[0]["norms"],
            "loopback_bytes": answers[0]["loopback_bytes"] / steps,
        }

    def sent_bytes(self, who: str, first: int) -> float:
        """Return the bytes a rank sends in one step, from its collectives, in rings."""
        calls = self._ask("count", who=who, first=first)[0]["calls"]
        return sum(ring_bytes(call["kind"], call["bytes"], call["ranks"]) for call in calls)

    def _ask(self, job: str, **arguments: Any) -> list[Answer]:
        with ThreadPoolExecutor(len(self.workers)) as pool:
            calls = [
                pool.submit(worker.ask, job, samples=self.samples, **arguments)
                for worker in self.workers
            ]
            return [one.result() for one in calls]


def ring_bytes(kind: str, whole: float, ranks: int) -> float:
    """Return the bytes each rank sends in a ring collective over `whole` bytes.

    Patarasuk and Yuan 2009 (J. Parallel Distrib. Comput. 69): reduce-scatter and all-gather move
    (n-1)/n of the whole each, and an all-reduce is one after the other.
    """
    return (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks * whole


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON if asked."""
    flags = _parser().parse_args(argv)
    shape = QUICK if flags.quick else _shape(flags)
    rounds, steps = (2, 1) if flags.quick else (flags.rounds, flags.steps)
    with team(1, shape, flags.threads) as alone, team(RANKS, shape, 1) as ranks:
        section = measure(alone, ranks, shape, rounds=rounds, steps=steps)
        section["bytes"] = count_bytes(ranks, section["rows"])
        others = measure_axes(alone, ranks, shape, section["alone"], steps=steps)
    report = {
        "benchmark": "parallel_cpu",
        "machine": machine(),
        "shape": asdict(shape),
        "ranks": RANKS,
        "threads_alone": flags.threads,
        "bucket_elements": BUCKET_ELEMENTS,
        "rounds": rounds,
        "steps_per_turn": steps,
        **{name: value for name, value in section.items() if name not in ("rows", "alone")},
        "rows": [asdict(row) for row in section["rows"]],
        "other_axes": others["efficiency"],
        "other_rows": [asdict(row) for row in others["rows"]],
    }
    print(shown(report, section["rows"]))
    print(table(shown_axes(others)))
    if flags.json is not None:
        flags.json.parent.mkdir(parents=True, exist_ok=True)
        flags.json.write_text(json.dumps(report, indent=1) + "\n")


@contextmanager
def team(size: int, shape: Shape, threads: int) -> Iterator[Team]:
    """Start processes and build their contestants; ended with the block."""
    part = replace(shape, micro_batch=shape.micro_batch // size)
    given = [*our_flags("fp32", part), "--global-batch-size", str(shape.micro_batch)]
    given += ["--ddp-bucket-size", str(BUCKET_ELEMENTS), "--num-threads", str(threads)]
    whole = ("--micro-batch-size", str(shape.micro_batch))
    in_parts = ("--micro-batch-size", str(shape.micro_batch // MICRO_BATCHES))
    ours: dict[str, tuple[str, ...]] = {ALONE: (), EXPERTS_ALONE: _EXPERTS}
    if size > 1:
        axes = {who: (*f, *(in_parts if "pp" in who else whole)) for who, f in AXES.items()}
        ours = {**OURS, **axes, **EXPERTS}
    with ExitStack() as stack, ThreadPoolExecutor(size) as pool:
        workers = start_ranks(stack, WORKER, size)
        joined = [
            pool.submit(
                worker.ask,
                "join",
                threads=threads,
                shape=asdict(part),
                flags=given,
                ours=ours,
                plain=PLAIN_ALONE if size == 1 else DDP,
            )
            for worker in workers
        ]
        parameters = joined[0].result()["parameters"]
        for one in joined:
            one.result()
        yield Team(tuple(workers), shape.micro_batch, parameters)
        for done in [pool.submit(worker.ask, "leave") for worker in workers]:
            done.result()


def start_ranks(stack: ExitStack, script: Path, size: int) -> list[Worker]:
    """Start `size` processes of a script that can find each other; they end with the stack."""
    port = str(free_port())
    return [
        stack.enter_context(Worker(sys.executable, script, _environment(rank, size, port)))
        for rank in range(size)
    ]


def _environment(rank: int, size: int, port: str) -> dict[str, str]:
    """Return the environment variables of a rank, as a launcher sets them."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def measure(alone: Team, ranks: Team, shape: Shape, *, rounds: int, steps: int) -> dict[str, Any]:
    """Return all contestants in turns, after one uncounted turn each."""
    teams = {ALONE: alone, PLAIN_ALONE: alone, DDP: ranks, **dict.fromkeys(OURS, ranks)}
    taken = dict.fromkeys(teams, 0)

    def turn(who: str) -> Answer:
        first = taken[who] * steps
        taken[who] += 1
        return teams[who].take(who, first, steps)

    order = [ALONE, *OURS, PLAIN_ALONE, DDP]
    warm = {who: turn(who) for who in order}
    rows = take_turns(
        {who: lambda who=who: turn(who) for who in order},  # type: ignore[misc]
        repeats=rounds,
        amount=shape.tokens,
        unit="tokens",
    )
    check_all_equal(rows, warm)
    by_name = {row.who: row for row in rows}
    base, plain, ddp = (by_name[who] for who in (ALONE, PLAIN_ALONE, DDP))
    efficiency = {who: ratio(base, row_of(rows, who), "wall") for who in OURS}
    return {
        "rows": rows,
        "alone": _results(base, warm),
        "efficiency": efficiency | {DDP: ratio(plain, ddp, "wall")},
        "cpu_efficiency": {who: ratio(base, row_of(rows, who)) for who in OURS}
        | {DDP: ratio(plain, ddp)},
        "beside_ddp": {who: _relative_efficiency(rows, who) for who in OURS},
        "ddp_over_ours": {who: ratio(ddp, row_of(rows, who), "wall") for who in OURS},
        "gain_of_overlap": ratio(row_of(rows, "ours"), row_of(rows, "ours, overlap"), "wall"),
    }


def measure_axes(
    alone: Team, ranks: Team, shape: Shape, expected: Contestant, *, steps: int
) -> dict[str, Any]:
    """Return the other axes in turns with one process of the same model.

    Args:
        expected: what one process has made of the same batches, from the same weights.
    """
    rounds = len(expected.losses) // steps - 1
    teams = {ALONE: alone, **dict.fromkeys(AXES, ranks)}
    teams |= {EXPERTS_ALONE: alone, **dict.fromkeys(EXPERTS, ranks)}
    # Continued from where the first section has left one process.
    taken = dict.fromkeys(teams, 0) | {ALONE: rounds + 1}

    def turn(who: str) -> Answer:
        first = taken[who] * steps
        taken[who] += 1
        return teams[who].take(who, first, steps)

    warm = {who: turn(who) for who in teams}
    rows = take_turns(
        {who: lambda who=who: turn(who) for who in teams},  # type: ignore[misc]
        repeats=rounds,
        amount=shape.tokens,
        unit="tokens",
    )
    by_name, found = {row.who: row for row in rows}, {}
    with_experts = _results(by_name[EXPERTS_ALONE], warm)
    for base, same, ways in (
        (ALONE, expected, AXES),
        (EXPERTS_ALONE, with_experts, EXPERTS),
    ):
        for who in ways:
            check_equal_work("fp32", _results(by_name[who], warm), same)
            found[who] = {
                kind: ratio(by_name[base], by_name[who], kind) for kind in ("wall", "cpu")
            }
    return {"rows": rows, "efficiency": found}


def shown_axes(others: Mapping[str, Any]) -> Section:
    """Return the other axes as a section."""
    notes = [
        f"{who}: {found['wall']:.3f} times as fast as 1 process, {found['cpu']:.3f} in CPU time"
        for who, found in others["efficiency"].items()
    ]
    return Section("other axes", "2 ranks of 1 thread against 1 process", others["rows"], [], notes)


def _relative_efficiency(rows: list[Row], who: str) -> float:
    """Return our efficiency over DDP's: the median over rounds of all four contestants."""
    by_name = {row.who: [turn["wall"] for turn in row.turns] for row in rows}
    turns = zip(*(by_name[name] for name in (ALONE, who, PLAIN_ALONE, DDP)))
    return float(median((ours / spread) / (plain / ddp) for ours, spread, plain, ddp in turns))


def check_all_equal(rows: Sequence[Row], warm: Mapping[str, Answer]) -> None:
    """Check that all train the same, and that overlapping changes no bit."""
    seen = {row.who: _results(row, warm) for row in rows}
    for found in seen.values():
        check_equal_work("fp32", found, seen[PLAIN_ALONE])
    one, other = seen["ours"], seen["ours, overlap"]
    if (one.losses, one.norms) != (other.losses, other.norms):
        raise NumericsError(
            "overlapping the sum of gradients changes results",
            found=f"losses {one.losses} without, {other.losses} with --overlap-grad-reduce",
            fix="this is a defect: please report it",
        )


def _results(row: Row, warm: Mapping[str, Answer]) -> Contestant:
    turns = [warm[row.who], *row.turns]
    return Contestant(
        row.who,
        losses=[loss for turn in turns for loss in turn["losses"]],
        norms=[norm for turn in turns for norm in turn["norms"]],
    )


def count_bytes(ranks: Team, rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return bytes sent per rank and step: counted, by formula, and on the loopback device."""
    whole = ranks.parameters * BYTES
    found = {}
    for row in rows:
        if row.who in (ALONE, PLAIN_ALONE):
            continue
        formula = ring_bytes("all-reduce", whole, RANKS)  # or the two halves of one
        if OURS.get(row.who, ())[:2] == _FULLY:  # gathered for the backward pass once more
            formula += ring_bytes("all-gather", whole, RANKS)
        measured = median(turn["loopback_bytes"] for turn in row.turns) / RANKS
        found[row.who] = {"formula": formula, "loopback": measured}
        if row.who != DDP:  # which communicates in C++, where nothing can be counted
            found[row.who]["counted"] = ranks.sent_bytes(row.who, 0)
    return found


def shown(report: Mapping[str, Any], rows: list[Row]) -> str:
    """Return the report as text."""
    host = report["machine"]
    section = Section(
        "data parallelism",
        f"{report['ranks']} ranks of 1 thread against 1 process of {report['threads_alone']}",
        rows,
        [
            Target(f"efficiency of {who} over DDP's own", report["beside_ddp"][who], at_least=0.95)
            for who in TARGETED
        ],
    )
    for who, found in report["efficiency"].items():
        cpu = report["cpu_efficiency"][who]
        note = f"{who}: {found:.3f} times as fast as 1 process, {cpu:.3f} in CPU time"
        if who != DDP:
            note += (
                f"; that is {report['beside_ddp'][who]:.3f} of DDP's own; "
                f"{report['ddp_over_ours'][who]:.3f} times as fast as DDP itself"
            )
        section.notes.append(note)
    section.notes.append(f"overlap makes a step {report['gain_of_overlap']:.3f} times as fast")
    for who, sent in report["bytes"].items():
        over = sent["formula"]
        counted = f"{sent['counted'] / over:.4f}" if "counted" in sent else "not counted"
        section.notes.append(
            f"{who}: {over / 1e6:.3f} MB per rank and step by the formula; of that at the "
            f"collectives {counted}, on the loopback device {sent['loopback'] / over:.4f}"
        )
    lines = [
        f"{host['cpu']}, {host['cores']} cores, torch {host['torch']}, "
        f"load {host['load_1min']:.1f} at the end",
        ", ".join(f"{name} {value}" for name, value in report["shape"].items())
        + f" (all ranks); {report['rounds']} rounds of {report['steps_per_turn']} steps",
        "",
        table(section),
    ]
    return "\n".join(lines)


def _shape(flags: argparse.Namespace) -> Shape:
    return Shape(
        layers=flags.layers,
        hidden=flags.hidden,
        heads=flags.heads,
        seq_length=flags.seq_length,
        vocab=flags.vocab,
        micro_batch=flags.batch,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="parallel_cpu", description=__doc__)
    add = parser.add_argument
    add(
        "--quick", action="store_true", help="a tiny model and two rounds: only to see that it runs"
    )
    add("--rounds", type=int, default=9, help="turns of each contestant [9]")
    add("--steps", type=int, default=2, help="steps of a turn [2]")
    add("--threads", type=int, default=RANKS, help="of the one process [2]")
    add("--layers", type=int, default=4, help="[4]")
    add("--hidden", type=int, default=512, help="[512]")
    add("--heads", type=int, default=8, help="[8]")
    add("--seq-length", type=int, default=256, help="[256]")
    add("--vocab", type=int, default=16384, help="[16384]")
    add("--batch", type=int, default=8, help="samples of a step, of all ranks together [8]")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    return parser


if __name__ == "__main__":
    run_program(main)
