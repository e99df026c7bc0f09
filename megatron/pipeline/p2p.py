"""Tensors between pipeline stages: all messages of a batch are posted together, then waited for.

Posted one at a time, two stages that both send first would wait for each other. Messages have no
names: between two stages they are matched in the order in which they were posted. What is in them,
and what a receiver must have room for, is the caller's business.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from megatron.errors import PeerError
from megatron.mpu.collectives import exchanging
from megatron.mpu.context import Group


class PipelineMessage(NamedTuple):
    """Tensors to send to a stage of the group, or buffers for those received from it."""

    sends: bool
    peer: int  # index in the group
    tensors: tuple[Tensor, ...]
    about: str  # for errors: what it is


class Exchanger(Protocol):
    """The interface that exchanges messages: between ranks, or between threads in a test."""

    def exchange(self, messages: Sequence[PipelineMessage]) -> None:
        """Return once all sent tensors may be overwritten and all received ones be read."""


class GroupExchanger:
    """Messages over a process group, whose timeout limits every wait."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def exchange(self, messages: Sequence[PipelineMessage]) -> None:
        """Post all messages in their order, then wait for all.

        With NCCL "may be read" means by the current stream.

        Raises:
            PeerError: a message did not arrive within the group's timeout, or a peer is gone.
        """
        posted = [
            (message, tensor)
            for message in messages
            for tensor in message.tensors
            if tensor.numel()
        ]
        if not posted:
            return
        called = [(message.sends, message.peer, tensor) for message, tensor in posted]
        waited: Sequence[PipelineMessage] = messages
        try:
            with exchanging("messages", called, self._group):
                works = dist.batch_isend_irecv(
                    [_operation(message, tensor, self._group) for message, tensor in posted]
                )
                for at, work in enumerate(works):
                    # NCCL has one handle for the whole batch.
                    waited = [posted[at][0]] if len(works) == len(posted) else messages
                    work.wait()
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
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return PeerError(
        "a message between pipeline stages was not exchanged",
        found=f"at stage {group.rank}: {waited}: {reason}",
        fix="look at the log of that rank; if it only is slow, raise --distributed-timeout-minutes",
    )
