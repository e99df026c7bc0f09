"""How long pipeline stages wait: schedules run by the executor, beside the theory.

Every stage is a process over gloo whose forward and backward passes sleep, so that any machine has
enough cores: what is measured is the order of work and the cost of exchanges, not of computing.
"""

import argparse
import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.errors import MachineError
from megatron.mpu.collectives import barrier
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.topology import Topology
from megatron.mpu.weight_gradients import WeightGradients
from megatron.pipeline.executor import Executor, StageWork
from megatron.pipeline.schedule import ScheduleName
from megatron.pipeline.theory import bubble_share, peak_activations

WITHIN_S = 300.0
CASES = (  # schedule, stages, micro-batches, chunks
    (ScheduleName.GPIPE, 2, 8, 1),
    (ScheduleName.ONE_F_ONE_B, 2, 8, 1),
    (ScheduleName.INTERLEAVED, 2, 8, 2),
    (ScheduleName.ZERO_BUBBLE, 2, 8, 1),
    (ScheduleName.ONE_F_ONE_B, 4, 8, 1),
    (ScheduleName.INTERLEAVED, 4, 8, 2),
    (ScheduleName.ZERO_BUBBLE, 4, 8, 1),
)


class Case(NamedTuple):
    """One pipeline: its schedule and its sizes."""

    schedule: ScheduleName
    stages: int
    microbatches: int
    chunks: int

    @property
    def theory(self) -> float:
        """Return the share of a step in which a stage waits."""
        return bubble_share(
            self.schedule,
            num_stages=self.stages,
            num_microbatches=self.microbatches,
            num_chunks=self.chunks,
        )


class Measured(NamedTuple):
    """Times of one stage in its fastest step."""

    step_s: float  # from a barrier to the next
    work_s: float  # in which it computed, that is slept
    peak: int  # graphs of chunks alive at once


@dataclass
class _Sleeper:
    """A stand-in for the layers of a stage: sleeps, and counts for how long."""

    unit_s: float  # of forward, input gradient and weight gradient of one chunk each
    weights_wait: bool = False  # whether the backward pass is that of the input alone
    worked_s: float = 0.0
    alive: int = 0
    peak: int = 0

    def work(self, units: float) -> None:
        began = time.perf_counter()
        time.sleep(units * self.unit_s)
        self.worked_s += time.perf_counter() - began

    def run(self, chunk: int, carry: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        del chunk
        (hidden,) = carry
        return (_SLEEP(hidden.requires_grad_(), self),)

    def loss(self, carry: tuple[Tensor, ...], labels: Any) -> tuple[Tensor, Tensor]:
        del labels
        return carry[0].sum(), torch.ones(())


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, sleeper: _Sleeper) -> Tensor:
        ctx.sleeper = sleeper
        sleeper.alive += 1
        sleeper.peak = max(sleeper.peak, sleeper.alive)
        sleeper.work(1)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.sleeper.work(1 if ctx.sleeper.weights_wait else 2)
        ctx.sleeper.alive -= 1
        return grad, None


# Function.apply is untyped in torch; this is its type here.
_SLEEP: Callable[[Tensor, _Sleeper], Tensor] = _Sleep.apply


@dataclass
class _Queue(WeightGradients):
    """A queue of weight gradients that are sleeps."""

    sleeper: _Sleeper
    keys: list[Hashable] = field(default_factory=list)

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        self.keys.append(key)
        self.sleeper.weights_wait = True
        yield
        self.sleeper.weights_wait = False

    def compute(self, key: Hashable) -> None:
        self.keys.remove(key)
        self.sleeper.work(1)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every case and print a table."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--unit-ms", type=float, default=30.0, help="forward of one stage [30]")
    flags.add_argument("--steps", type=int, default=3, help="steps, of which the best counts [3]")
    flags.add_argument("--stages", type=int, help="only the cases of that many stages")
    args = flags.parse_args(argv)
    print("| schedule | p | m | v | bubble | theory | step / theory | most alive | theory |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in (Case(*each) for each in CASES):
        if args.stages in (None, case.stages):
            stages = measure(case, unit_s=args.unit_ms / 1000, steps=args.steps)
            print(row(case, stages, unit_s=args.unit_ms / 1000), flush=True)


def row(case: Case, stages: Sequence[Measured], *, unit_s: float) -> str:
    """Return one line of the table."""
    step = max(one.step_s for one in stages)
    share = 1 - sum(one.work_s for one in stages) / (step * len(stages))
    expected = 3 * unit_s * case.microbatches / (1 - case.theory)
    peaks = peak_activations(
        case.schedule,
        num_stages=case.stages,
        num_microbatches=case.microbatches,
        num_chunks=case.chunks,
    )
    sizes = f"{case.stages} | {case.microbatches} | {case.chunks}"
    return (
        f"| {case.schedule} | {sizes} | {share:.1%} | {case.theory:.1%} | {step / expected:.3f} | "
        f"{' '.join(str(one.peak) for one in stages)} | {' '.join(map(str, peaks))} |"
    )


def measure(case: Case, *, unit_s: float, steps: int) -> list[Measured]:
    """Run a case on one process per stage; return the fastest step of every stage."""
    start = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(case.stages):
            receive, send = start.Pipe(duplex=False)
            task = (case, rank, str(Path(folder) / "store"), unit_s, steps, send)
            process = start.Process(target=_stage, args=task, daemon=True)
            process.start()
            send.close()
            ends.append(receive)
            processes.append(process)
        try:
            return [_answer(end, rank) for rank, end in enumerate(ends)]
        finally:
            for process in processes:
                process.join(5)
                process.kill()


def _answer(end: Connection, rank: int) -> Measured:
    try:
        if end.poll(WITHIN_S):
            return Measured(*end.recv())
    except EOFError:
        pass
    raise MachineError(
        "a stage of the benchmark ended or fell silent",
        found=f"stage {rank}, within {WITHIN_S:.0f} s",
        fix="read what it printed above",
    )


def _stage(
    case: Case, rank: int, store: str, unit_s: float, steps: int, answer: Connection
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=case.stages
    )
    limit = timedelta(seconds=WITHIN_S)
    group = ParallelContext.build(Topology(pp=case.stages), limit).pp
    sleeper = _Sleeper(unit_s / case.chunks)
    executor = Executor(
        StageWork(sleeper.run, sleeper.loss, case.chunks),
        group,
        schedule=case.schedule,
        weight_gradients=_Queue(sleeper) if case.schedule == ScheduleName.ZERO_BUBBLE else None,
    )
    found = [_step(executor, sleeper, case, group) for _ in range(1 + steps)]
    answer.send(tuple(min(found[1:])))  # the first sends headers too
    barrier(group)
    dist.destroy_process_group()


def _step(executor: Executor, sleeper: _Sleeper, case: Case, group: Group) -> Measured:
    sleeper.worked_s, sleeper.peak = 0.0, 0
    batches = iter([((torch.zeros(8),), ())] * case.microbatches)
    barrier(group)
    began = time.perf_counter()
    executor.train(batches, case.microbatches, scale=1.0)
    barrier(group)
    return Measured(time.perf_counter() - began, sleeper.worked_s, sleeper.peak)


if __name__ == "__main__":
    main()
