"""Tensors between pipeline stages: all messages of a batch are posted together.

Posted one at a time, two stages that both send first would wait for each other. Messages have no
names: between two stages they are matched in the order in which they were posted. What is in them,
and what a receiver must have room for, is the caller's business.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from megatron.errors import PeerError, first_line
from megatron.mpu.collectives import exchanging, waiting_for
from megatron.mpu.context import Group
from megatron.spans import WAIT, last_until, span


class PipelineMessage(NamedTuple):
    """Tensors to send to a stage of the group, or buffers for those received from it."""

    sends: bool
    peer: int  # index in the group
    tensors: tuple[Tensor, ...]
    about: str  # for errors: what it is


class MessagesUnderWay(Protocol):
    """Messages that were posted together."""

    def wait(self) -> None:
        """Return once all sent tensors may be overwritten and all received ones be read."""


class Exchanger(Protocol):
    """The interface that exchanges messages: between ranks, or between threads in a test."""

    def start(self, messages: Sequence[PipelineMessage]) -> MessagesUnderWay:
        """Post all messages in their order, and return before they have arrived."""

    def exchange(self, messages: Sequence[PipelineMessage]) -> None:
        """Post all messages in their order, then wait for all."""


class GroupExchanger:
    """Messages over a process group, whose timeout limits every wait."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def start(self, messages: Sequence[PipelineMessage]) -> "_Posted":
        """Post all messages in their order; what is sent must not change before `wait` returns.

        Raises:
            PeerError: (here, or when they are waited for) a message did not arrive within the
                group's timeout, or a peer is gone.
        """
        return _Posted(messages, self._group)

    def exchange(self, messages: Sequence[PipelineMessage]) -> None:
        """Post all messages in their order, then wait for all."""
        self.start(messages).wait()


class _Posted:
    """Messages of one batch. With NCCL "may be read" means by the current stream."""

    def __init__(self, messages: Sequence[PipelineMessage], group: Group) -> None:
        self._messages, self._group = messages, group
        self._parts = [
            (message, tensor)
            for message in messages
            for tensor in message.tensors
            if tensor.numel()
        ]
        self._works: Sequence[dist.Work] = ()
        self._waited: Future[object] | None = None
        if not self._parts:
            return
        called = [(message.sends, message.peer, tensor) for message, tensor in self._parts]
        with exchanging("messages", called, group) as begun, self._explained(messages):
            self._works = dist.batch_isend_irecv(
                [_operation(message, tensor, group) for message, tensor in self._parts]
            )
            if begun is not None and not called[0][2].is_cuda:
                self._waited = Future()
                last_until(begun, self._waited)

    def wait(self) -> None:
        # NCCL has one handle for the whole batch.
        each = len(self._works) == len(self._parts)
        with span(WAIT) if self._works else nullcontext(), waiting_for(self._group):
            for at, work in enumerate(self._works):
                with self._explained([self._parts[at][0]] if each else self._messages):
                    work.wait()
        self._works = ()
        if self._waited is not None and not self._waited.done():
            self._waited.set_result(None)

    @contextmanager
    def _explained(self, waited: Sequence[PipelineMessage]) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not _is_of_transport(error):  # a signal handler's, such as that of data loaders
                raise
            raise _failed(waited, self._group, error) from error


def _operation(message: PipelineMessage, tensor: Tensor, group: Group) -> dist.P2POp:
    assert tensor.is_contiguous(), tensor.shape  # noqa: S101  # invariant: callers make it so
    move = dist.isend if message.sends else dist.irecv
    return dist.P2POp(move, tensor, group.ranks[message.peer], group.handle)  # type: ignore[no-untyped-call]


def _is_of_transport(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(
        word in str(error).lower() for word in ("gloo", "nccl", "connection")
    )


def _failed(messages: Sequence[PipelineMessage], group: Group, error: RuntimeError) -> PeerError:
    waited = "; ".join(
        f"{message.about} {'to' if message.sends else 'from'} stage {message.peer} "
        f"(rank {group.ranks[message.peer]})"
        for message in messages
    )
    reason = first_line(error)
    return PeerError(
        "a message between pipeline stages was not exchanged",
        found=f"at stage {group.rank}: {waited}: {reason}",
        fix="look at the log of that rank; if it only is slow, raise --distributed-timeout-minutes",
    )
