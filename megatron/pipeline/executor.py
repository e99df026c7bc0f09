"""Runs a schedule: does one action after the other, and keeps no tensor longer than it is needed.

The order of work is decided elsewhere (`schedule.py`), and the computations of a stage are given.
An output is not kept after it was sent: of a forward pass remain its input and the edges of its
graph, which a received gradient enters. A lone stage runs schedule "none" through the same code.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron import device, spans
from megatron.errors import MegatronError
from megatron.mpu.context import Group
from megatron.mpu.weight_gradients import WeightGradients
from megatron.pipeline.action import (
    COMMUNICATION,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    needed,
    peer_of,
    virtual_stage,
)
from megatron.pipeline.exchange import posted_early
from megatron.pipeline.p2p import (
    Exchanger,
    GroupExchanger,
    MessagesUnderWay,
    PipelineMessage,
)
from megatron.pipeline.schedule import ScheduleName, build_batches, build_evaluation_batches
from megatron.pipeline.signature import (
    HEADER_NUMBERS,
    Signature,
    decode_signature,
    encode_signature,
    format_signature,
    header_into,
    signature_of,
)
from megatron.timers import Timers

Tensors = tuple[Tensor, ...]
Batches = Iterator[tuple[Tensors, Tensors]]  # of each micro-batch what goes in, and the labels


@dataclass(frozen=True, slots=True)
class StageWork:
    """The computations of one stage.

    Attributes:
        run: takes one of its chunks' input to its output.
        loss: the sum of the losses of the last output against the labels, and their count.
        num_chunks: parts of the model that it holds.
    """

    run: Callable[[int, Tensors], Tensors]
    loss: Callable[[Tensors, Tensors], tuple[Tensor, Tensor]]
    num_chunks: int = 1


class _Place(NamedTuple):
    microbatch: int
    chunk: int


class _Edge(NamedTuple):
    """Messages of equal shape: into one virtual stage, of one kind of micro-batch."""

    into: int  # the virtual stage that the output goes to
    kind: Signature  # what goes into the model, as every stage reads it: without gradients
    trains: bool


@dataclass(slots=True)
class _Alive:
    """The results of a forward pass that its backward pass needs."""

    inputs: Tensors  # leaves, where a gradient is wanted
    edges: tuple[GradientEdge, ...]  # where the gradients of the outputs enter
    loss: Tensor | None = None


@dataclass(slots=True)
class _Step:
    """The tensors of one step that are in use between two actions."""

    batches: Batches
    trains: bool
    timers: Timers
    scale: float | Tensor = 1.0
    of: Callable[[int], AbstractContextManager[object]] = nullcontext
    kinds: list[Signature] = field(default_factory=list)  # of every micro-batch drawn so far
    waiting: dict[int, Tensors] = field(default_factory=dict)  # inputs of the model
    labels: dict[int, Tensors] = field(default_factory=dict)
    inputs: dict[_Place, Tensors] = field(default_factory=dict)  # received
    outputs: dict[_Place, Tensors] = field(default_factory=dict)  # to be sent
    alive: dict[_Place, _Alive] = field(default_factory=dict)
    gradients_in: dict[_Place, Tensors] = field(default_factory=dict)  # received
    gradients_out: dict[_Place, Tensors] = field(default_factory=dict)  # to be sent
    sums: list[Tensor] = field(default_factory=list)
    under_way: MessagesUnderWay | None = None
    arriving: set[Action] = field(default_factory=set)  # what is received with those


class Executor:
    """One stage of a pipeline; all stages are made and used together.

    Args:
        work: what this stage computes.
        group: the stages.
        schedule: the name of the order of training.
        exchanger: who carries messages; the group's own ranks if None.
        weight_gradients: where gradients of weights wait between `BACKWARD_INPUT` and
            `BACKWARD_WEIGHT`; None: they are computed in the former.
        overlaps: messages are posted early, and waited for when they are needed, or before the
            next ones are posted; else at once.
    """

    def __init__(
        self,
        work: StageWork,
        group: Group,
        *,
        schedule: ScheduleName,
        exchanger: Exchanger | None = None,
        weight_gradients: WeightGradients | None = None,
        timers: Timers | None = None,
        overlaps: bool = False,
    ) -> None:
        self._work, self._group, self._schedule = work, group, schedule
        self._exchanger = exchanger or GroupExchanger(group)
        self._weight_gradients = weight_gradients
        self._timers, self._overlaps = timers or Timers(), overlaps
        self._last = group.size * work.num_chunks - 1
        self._outgoing: dict[_Edge, Signature] = {}
        self._announced: set[_Edge] = set()  # outgoing ones whose receiver has the header
        self._incoming: dict[_Edge, Signature] = {}

    def train(
        self,
        batches: Batches,
        num_microbatches: int,
        *,
        scale: float | Tensor,
        of: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> list[Tensor]:
        """Add the gradients of `scale` times the loss of so many micro-batches to the parameters.

        Args:
            scale: one for every loss, or [k] for k of them, whose products are added up.
            of: the context of the forward pass of a micro-batch, by its number.

        Returns:
            [total, count] of every micro-batch in order on the last stage, [2] or [2, k]; nothing
            on the others.
        """
        step = _Step(batches, trains=True, timers=self._timers, scale=scale, of=of)
        plan = build_batches(
            self._schedule,
            stage=self._group.rank,
            num_stages=self._group.size,
            num_microbatches=num_microbatches,
            num_chunks=self._work.num_chunks,
        )
        return self._do(plan, step)

    @torch.no_grad()
    def evaluate(self, batches: Batches, num_microbatches: int) -> list[Tensor]:
        """Return the losses of so many micro-batches, as `train` returns them; nothing is kept."""
        plan = build_evaluation_batches(
            stage=self._group.rank,
            num_stages=self._group.size,
            num_microbatches=num_microbatches,
            num_chunks=self._work.num_chunks,
        )
        # Timers are about training; measurements of evaluation are dropped.
        return self._do(plan, _Step(batches, trains=False, timers=Timers()))

    def _do(self, plan: Sequence[tuple[Action, ...]], step: _Step) -> list[Tensor]:
        for actions in posted_early(plan) if self._overlaps else plan:
            for action in actions:
                self._draw(action.microbatch, step)
            kind, *at = actions[0]
            if kind in COMMUNICATION:
                with step.timers("pipeline-exchange"):
                    self._communicate(actions, step)
                continue
            if needed(actions[0]) in step.arriving:
                with step.timers("pipeline-exchange"):
                    _land(step)
            name = "forward-compute" if kind is ActionKind.FORWARD else "backward-compute"
            with step.timers(name), spans.span(partial(self._name, actions[0])):
                if kind is ActionKind.FORWARD:
                    self._forward(_Place(*at), step)
                else:
                    self._backward(kind, _Place(*at), step)
        if step.under_way is not None:
            with step.timers("pipeline-exchange"):
                _land(step)
        return step.sums

    def _name(self, action: Action) -> str:
        """Return what a computation is called in a trace."""
        kind = action.kind.replace("_", " of ", 1)
        at = self._virtual(action.chunk)
        return f"{kind}, micro-batch {action.microbatch}, stage {at} of {self._last + 1}"

    def _draw(self, microbatch: int, step: _Step) -> None:
        """Read the batches up to a micro-batch; every stage reads all, and keeps what it needs."""
        while len(step.kinds) <= microbatch:
            with step.timers("batch-generator"):
                inputs, labels = next(step.batches)
            at = len(step.kinds)
            step.kinds.append(signature_of([tensor.detach() for tensor in inputs]))
            if self._group.is_first:
                step.waiting[at] = inputs
            if self._group.is_last:
                step.labels[at] = labels

    def _forward(self, place: _Place, step: _Step) -> None:
        at = self._virtual(place.chunk)
        inputs = step.waiting.pop(place.microbatch) if at == 0 else step.inputs.pop(place)
        with step.of(place.microbatch):
            carry = self._work.run(place.chunk, inputs)
        if at == self._last:
            total, count = self._work.loss(carry, step.labels.pop(place.microbatch))
            step.sums.append(torch.stack([total.detach(), count.detach()]))
            if step.trains:
                step.alive[place] = _Alive(inputs, (), loss=total)
            return
        self._check_outgoing(place, signature_of(carry), step)
        step.outputs[place] = tuple(tensor.detach() for tensor in carry)
        if step.trains:
            edges = tuple(get_gradient_edge(tensor) for tensor in carry if tensor.requires_grad)
            step.alive[place] = _Alive(inputs, edges)

    def _backward(self, kind: ActionKind, place: _Place, step: _Step) -> None:
        late = self._weight_gradients
        if kind is ActionKind.BACKWARD_WEIGHT:
            if late is not None:
                late.compute(place)
        elif kind is ActionKind.BACKWARD_INPUT and late is not None:
            with late.collecting(place):
                self._backward_pass(place, step)
        else:
            self._backward_pass(place, step)

    def _backward_pass(self, place: _Place, step: _Step) -> None:
        done = step.alive.pop(place)
        if done.loss is not None:
            torch.autograd.backward((done.loss * step.scale).sum())
        else:
            gradients = step.gradients_in.pop(place)
            if done.edges:  # not of a stage that has nothing to train
                torch.autograd.backward(done.edges, gradients)
        if self._virtual(place.chunk):
            step.gradients_out[place] = tuple(
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for tensor in done.inputs
                if tensor.requires_grad
            )

    def _communicate(self, actions: Sequence[Action], step: _Step) -> None:
        """Exchange the messages of one tick, after headers that receivers lack.

        Those of the tick before have arrived by then, so that no more than one batch is under way.
        """
        _land(step)
        headers = [(action, self._header(action, step)) for action in actions]
        self._exchanger.exchange([message for _, message in headers if message is not None])
        for action, message in headers:
            if message is not None and action.kind is ActionKind.RECV_FORWARD:
                edge = self._edge(action, step)
                what = header_into(edge.into)
                numbers = device.values_for_host(message.tensors[0], what).tolist()
                self._incoming[edge] = decode_signature(numbers)
        messages = [self._message(action, step) for action in actions]
        step.under_way = self._exchanger.start(messages)
        for action, message in zip(actions, messages):
            if action.kind in RECEIVES:
                self._take(action, message.tensors, step)
                step.arriving.add(action)
        if not self._overlaps:
            _land(step)

    def _header(self, action: Action, step: _Step) -> PipelineMessage | None:
        """Return the header of a message; None where both of its ends have it."""
        edge = self._edge(action, step)
        if action.kind is ActionKind.SEND_FORWARD and edge not in self._announced:
            self._announced.add(edge)
            numbers = torch.tensor(encode_signature(self._outgoing[edge]), device=device.current())
        elif action.kind is ActionKind.RECV_FORWARD and edge not in self._incoming:
            numbers = torch.empty(HEADER_NUMBERS, dtype=torch.int64, device=device.current())
        else:
            return None
        return self._to_peer(action, (numbers,))

    def _message(self, action: Action, step: _Step) -> PipelineMessage:
        place = _Place(action.microbatch, action.chunk)
        if action.kind is ActionKind.SEND_FORWARD:
            tensors = step.outputs.pop(place)
        elif action.kind is ActionKind.SEND_BACKWARD:
            tensors = step.gradients_out.pop(place)
        elif action.kind is ActionKind.RECV_FORWARD:
            signature = self._incoming[self._edge(action, step)]
            tensors = tuple(one.room(device.current()) for one in signature)
        else:
            signature = self._outgoing[self._edge(action, step)]
            tensors = tuple(one.room(device.current()) for one in signature if one.needs_grad)
        return self._to_peer(action, tuple(tensor.contiguous() for tensor in tensors))

    def _to_peer(self, action: Action, tensors: Tensors) -> PipelineMessage:
        peer = peer_of(action, self._group.rank, self._group.size)
        return PipelineMessage(action.kind in SENDS, peer, tensors, about=str(action))

    def _take(self, action: Action, tensors: Tensors, step: _Step) -> None:
        """Store received tensors until the computation that needs them."""
        place = _Place(action.microbatch, action.chunk)
        if action.kind is ActionKind.RECV_BACKWARD:
            step.gradients_in[place] = tensors
            return
        for tensor, expected in zip(tensors, self._incoming[self._edge(action, step)]):
            tensor.requires_grad_(expected.needs_grad)
        step.inputs[place] = tensors

    def _check_outgoing(self, place: _Place, found: Signature, step: _Step) -> None:
        """Check that an output has the shape of its edge, which the first output sets."""
        at = self._virtual(place.chunk)
        edge = _Edge(at + 1, step.kinds[place.microbatch], step.trains)
        expected = self._outgoing.setdefault(edge, found)
        if found != expected:
            raise MegatronError(
                "a pipeline stage hands over something else than for an equal micro-batch before",
                found=f"{format_signature(found)} from stage {self._group.rank} "
                f"(chunk {place.chunk}) for micro-batch {place.microbatch}; "
                f"expected {format_signature(expected)}",
                fix="let what a layer returns depend on nothing but what its input looks like",
            )

    def _edge(self, action: Action, step: _Step) -> _Edge:
        """Return the edge of an action's forward message, or of the one it is the backward of."""
        at = self._virtual(action.chunk)
        arrives_here = action.kind in (ActionKind.RECV_FORWARD, ActionKind.SEND_BACKWARD)
        into = at if arrives_here else at + 1
        return _Edge(into, step.kinds[action.microbatch], step.trains)

    def _virtual(self, chunk: int) -> int:
        return virtual_stage(self._group.rank, chunk, self._group.size)


def _land(step: _Step) -> None:
    """Wait for the messages that are under way, if there are any, and let go of them."""
    if step.under_way is not None:
        step.under_way.wait()
    step.under_way = None
    step.arriving.clear()
