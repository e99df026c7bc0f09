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
from megatron.mpu.collectives import checked_messages
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
        operations, owners = [], []
        for message in messages:
            move = dist.isend if message.sends else dist.irecv
            peer = self._group.ranks[message.peer]
            for tensor in message.tensors:
                if tensor.numel():
                    operations.append(_operation(move, tensor, peer, self._group))
                    owners.append(message)
        if not operations:
            return
        checked_messages(
            ((m.sends, m.peer, tensor) for m in messages for tensor in m.tensors if tensor.numel()),
            self._group,
        )
        waited: Sequence[PipelineMessage] = messages
        try:
            works = dist.batch_isend_irecv(operations)
            for at, work in enumerate(works):
                # NCCL has one handle for the whole batch.
                waited = [owners[at]] if len(works) == len(owners) else messages
                work.wait()
        except RuntimeError as error:
            if not _is_of_transport(error):  # a signal handler's, such as that of data loaders
                raise
            raise _failed(waited, self._group, error) from error


def _operation(move: object, tensor: Tensor, peer: int, group: Group) -> dist.P2POp:
    assert tensor.is_contiguous(), tensor.shape  # noqa: S101  # invariant: callers make it so
    return dist.P2POp(move, tensor, peer, group.handle)  # type: ignore[arg-type, no-untyped-call]


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
