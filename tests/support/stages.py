"""Pipeline stages as threads of one process, and a model for them that is nothing but tensors.

Messages are as strict as they can be: an exchange returns once every one of its messages has met
its other end, and between two stages they meet in the order in which they were posted.
"""

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.partition import Init, InitKind
from megatron.mpu.weight_gradients import WeightGradients
from megatron.pipeline.action import Round, Schedule
from megatron.pipeline.exchange import with_ticks
from megatron.pipeline.executor import Executor, StageWork
from megatron.pipeline.p2p import PipelineMessage
from megatron.pipeline.schedule import ScheduleName
from tests.support.deadlines import HANG_S

T = TypeVar("T")
WIDTH = 6


@dataclass(eq=False)
class _Half:
    """One end of a message, waiting for the other."""

    tensors: tuple[Tensor, ...]
    done: threading.Event = field(default_factory=threading.Event)


class Wire:
    """Joins the ends of messages between the stages of one pipeline."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[tuple[int, int], deque[_Half]] = defaultdict(deque)
        self._wanted: dict[tuple[int, int], deque[_Half]] = defaultdict(deque)
        self.broken = threading.Event()

    def post(self, stage: int, message: PipelineMessage) -> _Half:
        half = _Half(message.tensors)
        pair = (stage, message.peer) if message.sends else (message.peer, stage)
        with self._lock:
            (self._sent if message.sends else self._wanted)[pair].append(half)
            while self._sent[pair] and self._wanted[pair]:
                source, target = self._sent[pair].popleft(), self._wanted[pair].popleft()
                assert len(source.tensors) == len(target.tensors), message
                for one, other in zip(source.tensors, target.tensors):
                    assert (one.shape, one.dtype) == (other.shape, other.dtype), message
                    other.detach().copy_(one)
                source.done.set()
                target.done.set()
        return half


@dataclass
class Posted:
    """Messages that a stage has posted and not waited for yet."""

    exchanger: "ThreadExchanger"
    messages: Sequence[PipelineMessage]
    halves: Sequence[_Half]
    before: Sequence[Sequence[Tensor]]  # what is sent, as it was posted

    def wait(self) -> None:
        self.exchanger.under_way -= 1
        for message, half in zip(self.messages, self.halves):
            self.exchanger.wait(message, half)
        sent = [message.tensors for message in self.messages if message.sends]
        for tensors, originals in zip(sent, self.before):
            for tensor, original in zip(tensors, originals):
                assert torch.equal(tensor, original), "changed on its way"


class ThreadExchanger:
    """One stage's end of a `Wire`."""

    def __init__(self, wire: Wire, stage: int) -> None:
        self._wire, self._stage = wire, stage
        self.messages: list[PipelineMessage] = []  # without their tensors
        self.sent: list[weakref.ref[Tensor]] = []
        self.under_way = 0

    def start(self, messages: Sequence[PipelineMessage]) -> "Posted":
        self.under_way += 1
        assert self.under_way <= 1, "one batch at a time"
        # Received ones have no values until they were waited for.
        rooms = [
            message.tensors
            if message.sends
            else tuple(torch.empty_like(tensor) for tensor in message.tensors)
            for message in messages
        ]
        for message in messages:
            for tensor in () if message.sends else message.tensors:
                tensor.detach().fill_(torch.nan if tensor.is_floating_point() else 0)
        halves = [
            self._wire.post(self._stage, message._replace(tensors=tensors))
            for message, tensors in zip(messages, rooms)
        ]
        self.messages += [message._replace(tensors=()) for message in messages]
        self.sent += [weakref.ref(t) for m in messages if m.sends for t in m.tensors]
        before = [[tensor.clone() for tensor in m.tensors] for m in messages if m.sends]
        return Posted(self, messages, halves, before)

    def exchange(self, messages: Sequence[PipelineMessage]) -> None:
        self.start(messages).wait()

    def wait(self, message: PipelineMessage, half: _Half) -> None:
        while not half.done.wait(0.05):
            assert not self._wire.broken.is_set(), "another stage failed"
            assert self._wire_is_young(), f"stage {self._stage} waited too long for {message}"
        for tensor, room in zip(message.tensors, half.tensors):
            if not message.sends:
                tensor.detach().copy_(room)

    def _wire_is_young(self) -> bool:
        self._waits = getattr(self, "_waits", 0) + 1
        return self._waits < HANG_S / 0.05


def on_stages(count: int, body: Callable[[Group, ThreadExchanger], T]) -> list[T]:
    """Call `body` once per stage, each in a thread; the first error of all is raised."""
    wire = Wire()

    def run(stage: int) -> T:
        try:
            return body(Group(tuple(range(count)), stage), ThreadExchanger(wire, stage))
        except BaseException:
            wire.broken.set()
            raise

    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(run, stage) for stage in range(count)]
    errors = [error for one in running if (error := one.exception()) is not None]
    first = [e for e in errors if str(e) != "another stage failed"]
    for error in first or errors:
        raise error
    return [one.result() for one in running]


class Token:
    """Lives as long as the graph of one forward pass through one chunk."""


class _Remember(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return hidden * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Layer(nn.Module):
    """hidden + tanh(W hidden + b) / 2, where hidden [s, b, w] travels with ids [b, s]."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = ColumnParallelLinear(
            WIDTH,
            WIDTH,
            ctx=ParallelContext.single(),
            init=Init(InitKind.ONES),
            dtype=torch.float64,
        )
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden)) / 2


class Chunks:
    """The chunks of one stage, `depth` layers each, and what of them is alive."""

    def __init__(self, stage: int, num_stages: int, num_chunks: int, depth: int = 1) -> None:
        places = [chunk * num_stages + stage for chunk in range(num_chunks)]
        self.first, self.last = 0, num_stages * num_chunks - 1
        self.places = places
        self.layers = nn.ModuleList(
            nn.ModuleList(Layer(place * depth + i) for i in range(depth)) for place in places
        )
        self.alive: weakref.WeakSet[Token] = weakref.WeakSet()
        self.peak = 0
        self.outputs: list[weakref.ref[Tensor]] = []
        self.kept_outputs = 0  # outputs that were still there when the next forward began

    def run(self, chunk: int, carry: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.kept_outputs += sum(ref() is not None for ref in self.outputs)
        self.outputs.clear()
        if self.places[chunk] == self.first:
            (ids,) = carry
            hidden = torch.stack([torch.sin(ids.t().double() * k) for k in range(1, WIDTH + 1)], -1)
        else:
            hidden, ids = carry
        token = Token()
        self.alive.add(token)
        if torch.is_grad_enabled():
            function: Callable[..., Tensor] = _Remember.apply
            is_input = self.places[chunk] == self.first
            hidden = function(hidden.requires_grad_() if is_input else hidden, token)
        del token
        self.peak = max(self.peak, len(self.alive))
        layers: Any = self.layers[chunk]
        for layer in layers:
            hidden = layer(hidden)
        self.outputs.append(weakref.ref(hidden))
        return hidden, ids

    def loss(self, carry: tuple[Tensor, ...], labels: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        hidden, _ = carry
        (target,) = labels
        wrong = (hidden - target.t().unsqueeze(-1)).square()
        return wrong.sum(), torch.tensor(float(target.numel()), dtype=torch.float64)


def with_exchanges(orders: Sequence[Sequence[Round]], *, num_chunks: int) -> tuple[Schedule, ...]:
    """Return the schedule of each stage, messages included, without its ticks."""
    timed = with_ticks(orders, num_chunks=num_chunks)
    return tuple(tuple(entry.action for entry in each) for each in timed)


def microbatches(lengths: Sequence[int]) -> Iterator[tuple[tuple[Tensor], tuple[Tensor]]]:
    """One micro-batch of 2 rows for each length, the same ones every time."""
    draw = torch.Generator().manual_seed(5)
    for length in lengths:
        ids = torch.randint(0, 9, (2, length), generator=draw)
        yield (ids,), (torch.randn(2, length, generator=draw, dtype=torch.float64),)


def executor(
    chunks: Chunks,
    group: Group,
    exchanger: ThreadExchanger,
    schedule: ScheduleName,
    *,
    overlaps: bool = False,
) -> Executor:
    """An executor over `chunks`, with a queue of weight gradients where the schedule needs one."""
    queue = None
    if schedule == ScheduleName.ZERO_BUBBLE:
        queue = WeightGradients()
        queue.adopt(chunks.layers.parameters())
    work = StageWork(chunks.run, chunks.loss, len(chunks.places))
    return Executor(
        work,
        group,
        schedule=schedule,
        exchanger=exchanger,
        weight_gradients=queue,
        overlaps=overlaps,
    )
