"""One rank of `parallel_cpu.py`: its contestants, a few steps of one of them, and bytes counted.

Every contestant of a rank lives in the same process and waits there for its turn. What a reader
would get wrong: a turn ends when the parameters are whole again, so that a gather that overlaps
with the next step is never paid for by another contestant.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.data_worker import Answer, Clock, serve
from benchmarks.peers.plain_gpt import PlainGPT, PlainTrainer, Recipe, Shape, copy_weights
from benchmarks.workload import Workload, workload
from megatron.mpu import collectives
from megatron.mpu.collectives import barrier
from megatron.mpu.context import Group

LOOPBACK = Path("/proc/net/dev")


@dataclass(frozen=True)
class Contestant:
    """The function of one step on this rank's part of a batch, and the end of a turn.

    The part is that of replica `replica` of `replicas`.
    """

    step: Callable[[Tensor], tuple[float, float]]
    settle: Callable[[], object]
    replica: int
    replicas: int


_CONTESTANTS: dict[str, Contestant] = {}
_SHAPE: list[Shape] = []  # of this rank
_WORLD: list[Group] = []
_OPEN = ExitStack()


def join(
    threads: int,
    shape: dict[str, int],
    flags: list[str],
    ours: dict[str, list[str]],
    plain: str,
) -> Answer:
    """Join the other ranks named by the environment, and build all contestants.

    All have the same weights. `shape.micro_batch` is that of this rank. `ours` are names and flags
    on top; `plain` is the name of the peer.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    size = Shape(**shape)
    _SHAPE.append(size)
    base = _OPEN.enter_context(workload(flags, vocab_size=size.vocab))
    _WORLD.append(base.build.ctx.world)
    peer: nn.Module = PlainGPT(size)
    copy_weights(base.engine.stage.named_parameters(), peer, size)  # type: ignore[arg-type]
    replicas = base.build.ctx.dp
    if replicas.size > 1:
        peer = DistributedDataParallel(peer, gradient_as_bucket_view=True)
    for name, more in ours.items():
        _CONTESTANTS[name] = _ours(base.beside(*more))
    _CONTESTANTS[plain] = Contestant(
        PlainTrainer(peer, Recipe()).step, lambda: None, replicas.rank, replicas.size
    )
    return {"parameters": sum(p.numel() for p in peer.parameters())}


def take(who: str, first: int, steps: int, samples: int) -> Answer:
    """Take some steps: batches of `samples` from `first` on, of which this rank has its part."""
    contestant = _CONTESTANTS[who]
    texts = [
        _text(number, samples).chunk(contestant.replicas)[contestant.replica]
        for number in range(first, first + steps)
    ]
    barrier(_WORLD[0])
    wire = _loopback_bytes()
    with Clock() as clock:
        done = [contestant.step(text) for text in texts]
        contestant.settle()
    barrier(_WORLD[0])
    return clock.answer(
        losses=[loss for loss, _ in done],
        norms=[norm for _, norm in done],
        loopback_bytes=_loopback_bytes() - wire,
    )


def count(who: str, first: int, samples: int) -> Answer:
    """Take one step, and return the bytes this rank passes to each kind of collective."""
    with _counted() as found:
        take(who, first, 1, samples)
    return {"calls": found}


def leave() -> Answer:
    """Close everything, all ranks together."""
    _CONTESTANTS.clear()
    _OPEN.close()
    return {}


def _ours(run: Workload) -> Contestant:
    def step(text: Tensor) -> tuple[float, float]:
        report = run.step(text)
        return report.loss, report.grad_norm

    replicas = run.build.ctx.dp
    # Reading the state waits until it is complete.
    return Contestant(step, lambda: run.engine.state(optimizer=False), replicas.rank, replicas.size)


def _text(number: int, samples: int) -> Tensor:
    """Return batch `number` of random tokens, [samples, s + 1]; the same on all ranks."""
    generator = torch.Generator().manual_seed(number)
    shape = _SHAPE[0]
    return torch.randint(0, shape.vocab - 1, (samples, shape.seq_length + 1), generator=generator)


@contextmanager
def _counted() -> Iterator[list[dict[str, Any]]]:
    """Record every reduction and gather of tensors: kind, ranks, bytes of the whole tensor."""
    found: list[dict[str, Any]] = []

    def counted(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            whole = args[0] if kind == "reduce-scatter" else tensor
            size = dist.get_world_size(kwargs.get("group"))
            found.append({"kind": kind, "ranks": size, "bytes": whole.numel() * whole.itemsize})
            return real(tensor, *args, **kwargs)

        return call

    places = (
        ("all-reduce", dist, "all_reduce"),
        ("all-gather", collectives, "_ALL_GATHER"),
        ("reduce-scatter", collectives, "_REDUCE_SCATTER"),
    )
    with ExitStack() as patches:
        for kind, module, name in places:
            call = counted(kind, getattr(module, name))
            patches.enter_context(patch.object(module, name, call))
        yield found


def _loopback_bytes() -> int:
    """Return the bytes sent over the loopback device since boot, by all processes."""
    for line in LOOPBACK.read_text().splitlines() if LOOPBACK.exists() else []:
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


if __name__ == "__main__":
    serve({"join": join, "take": take, "count": count, "leave": leave})
