"""--check-collectives: before ranks communicate, they compare what each of them is about to do.

Ranks write down their call in the rendezvous store and read the others'. A store rather than a
process group: it is there whatever the backend is, needs no ranks to take part at once, and so can
name the missing ranks. Nothing of this is made when the flag is off.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store  # torch.distributed's own, which has no type there

from megatron.errors import CollectiveError, PeerError, first_line

_PREFIX = "megatron/collective_checks"
_GO = "go"
_EAGER_LOOKS = 50  # before it sleeps between looks: most ranks are less than this behind
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 0.0005, 0.02
_PACKAGE = Path(__file__).parents[1]
_TORCH = str(Path(torch.__file__).parent)
_OURS = tuple(str(_PACKAGE / "mpu" / name) for name in ("collectives.py", "collective_checks.py"))


class Call(NamedTuple):
    """One communication of a rank; `where` is for messages and is not compared."""

    operation: str
    shape: tuple[int, ...] | None
    dtype: str | None
    where: str

    @classmethod
    def of(cls, operation: str, tensor: Tensor | None) -> "Call":
        """Return a call with `tensor`, located at the caller outside of our collectives."""
        where = caller()
        if tensor is None:
            return cls(operation, None, None, where)
        return cls(operation, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), where)

    @property
    def compared(self) -> tuple[object, ...]:
        """The fields that must be equal on all ranks."""
        return self[:3]

    def __str__(self) -> str:
        about = "" if self.shape is None else f" of {list(self.shape)} {self.dtype}"
        return f"{self.operation}{about} at {self.where}"


class MessageRecord(NamedTuple):
    """A tensor to or from another rank, by its global rank."""

    sends: bool
    peer: int
    tensor: Tensor


class CollectiveChecks:
    """Compares the calls of this rank with those of the ranks that it communicates with.

    Ranks of a group count its calls, and each pair of ranks counts its messages in each direction.
    Make one per context, on all ranks together.

    Args:
        rank: the global rank of this process.
        seconds: how long a rank may be behind the others.
    """

    def __init__(self, store: Store, rank: int, *, seconds: float) -> None:
        # A connection of its own: other threads of this process wait in the store too.
        self._store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._store.set_timeout(timedelta(seconds=seconds))  # it waits for keys that are not there
        self._rank, self._seconds = rank, seconds
        # Contexts may be made one after the other in one job, and count from zero again.
        made = self._store.add(f"{_PREFIX}/made/{rank}", 1)
        self._prefix = f"{_PREFIX}/{made}"
        # By channel: calls that this rank has come to, has read all of, and has forgotten.
        self._calls: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._forgotten: Counter[str] = Counter()

    def collective(
        self, operation: str, tensor: Tensor | None, ranks: Sequence[int], *, is_equal: bool = True
    ) -> None:
        """Return once all `ranks` are about to make an equal call.

        Args:
            operation: with everything that has to be equal.
            tensor: whose dtype has to be equal and, if `is_equal`, its shape; else that of a row.

        Raises:
            CollectiveError: on each of them: they are not, or one has not come in time.
            PeerError: the store is gone.
        """
        if tensor is not None and not is_equal:
            tensor = tensor[:0]
        called = " ".join(map(str, ranks))
        self._compare(
            [self._announce(f"the group of ranks {called}", ranks, Call.of(operation, tensor))]
        )

    def messages(self, messages: Sequence[MessageRecord]) -> None:
        """Return once the peer of every message is about to send or receive its counterpart.

        Raises:
            CollectiveError: on both ends: they are not, or one has not come in time.
            PeerError: the store is gone.
        """
        arrived = []
        for sends, peer, tensor in messages:
            source, target = (self._rank, peer) if sends else (peer, self._rank)
            call = Call.of("message", tensor)
            arrived.append(
                self._announce(
                    f"the messages from rank {source} to {target}", (source, target), call
                )
            )
        self._compare(arrived)

    def objects_of_absent(self, obj: object, ranks: Sequence[int]) -> None:
        """Return None: all ranks are there."""

    def _announce(self, channel: str, ranks: Sequence[int], own: Call) -> "_CheckedCall":
        number = self._calls[channel]
        self._calls[channel] += 1
        key = f"{self._prefix}/{channel}"
        checked = _CheckedCall(channel, number, tuple(ranks), own, key)
        try:
            self._store.set(checked.key_of(self._rank), json.dumps([*own, self._done[channel]]))
            self._store.set(f"{self._prefix}/last/{self._rank}", f"{own}, in {channel}")
        except RuntimeError as error:
            raise _store_is_gone(error) from error
        return checked

    def _compare(self, checked_calls: Sequence["_CheckedCall"]) -> None:
        deadline = time.monotonic() + self._seconds
        try:
            for checked in checked_calls:
                posts = self._gather(checked, deadline)
                calls = {rank: post.call for rank, post in posts.items()}
                if len({call.compared for call in calls.values()}) > 1:
                    raise _differing(checked, calls)
                self._done[checked.channel] = checked.number + 1
                self._forget(checked, min(post.done for post in posts.values()))
        except RuntimeError as error:
            raise _store_is_gone(error) from error

    def _gather(self, checked: "_CheckedCall", deadline: float) -> dict[int, "_Post"]:
        """Return the record of every rank, once all are written and no rank has timed out."""
        missing = self._wait(checked, deadline)
        if missing:
            absent = {rank: self._last(rank) for rank in missing}
            timeout = json.dumps({"waiting": self._rank, "absent": absent, "s": self._seconds})
        # The first to write decides for all: a rank that arrives just now must not go on alone.
        verdict = self._store.compare_set(checked.verdict, "", timeout if missing else _GO).decode()
        if verdict != _GO:
            raise _missing(checked, json.loads(verdict), late=self._rank)
        if missing:
            self._wait(checked, deadline + self._seconds)  # by the verdict they are all there
        return {
            rank: _Post.read(self._store.get(checked.key_of(rank)))
            for rank in sorted(checked.ranks)
        }

    def _wait(self, checked: "_CheckedCall", deadline: float) -> list[int]:
        """Return the ranks without a record at the deadline, or when another rank times out."""
        missing = [rank for rank in checked.ranks if rank != self._rank]
        looks, sleep = 0, _SHORTEST_SLEEP_S
        while missing:
            missing = [rank for rank in missing if not self._store.check([checked.key_of(rank)])]
            looks += 1
            if not missing or time.monotonic() > deadline:
                break
            if looks > _EAGER_LOOKS:
                if self._store.check([checked.verdict]):
                    break
                time.sleep(sleep)
                sleep = min(2 * sleep, _LONGEST_SLEEP_S)
        return missing

    def _last(self, rank: int) -> str:
        key = f"{self._prefix}/last/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else "none yet"

    def _forget(self, checked: "_CheckedCall", until: int) -> None:
        """Delete the records that every rank had read when it wrote its last one."""
        for number in range(self._forgotten[checked.channel], until):
            old = checked._replace(number=number)
            self._store.delete_key(old.key_of(self._rank))
            if self._rank == min(checked.ranks):
                self._store.delete_key(old.verdict)
        self._forgotten[checked.channel] = until


class _CheckedCall(NamedTuple):
    """One call of a group, or one message between two ranks."""

    channel: str
    number: int
    ranks: tuple[int, ...]
    own: Call
    prefix: str

    @property
    def verdict(self) -> str:
        """The key that stores whether the ranks continue."""
        return f"{self.prefix}/{self.number}/verdict"

    def key_of(self, rank: int) -> str:
        """Return the key of a rank's call."""
        return f"{self.prefix}/{self.number}/{rank}"


class _Post(NamedTuple):
    """The record that a rank writes: its call, and the calls whose records it has all read."""

    call: Call
    done: int

    @classmethod
    def read(cls, text: bytes) -> "_Post":
        operation, shape, dtype, where, done = json.loads(text)
        shape = None if shape is None else tuple(shape)
        return cls(Call(operation, shape, dtype, where), done)


def caller() -> str:
    """Return file:line of the code outside of our collectives that called one.

    For code of this package's parallel layers also the first line outside of them, if there is one.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _OURS:
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    found = _place(frame)
    inner = str(_PACKAGE / "mpu")
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith((inner, _TORCH)):
        outer = outer.f_back
    return found if outer is None or outer is frame else f"{found} (from {_place(outer)})"


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    inside = path.is_relative_to(_PACKAGE)
    shown = path.relative_to(_PACKAGE.parent) if inside else path
    return f"{shown}:{frame.f_lineno}"


def _differing(checked: _CheckedCall, calls: dict[int, Call]) -> CollectiveError:
    (usual, count), *others = Counter(call.compared for call in calls.values()).most_common()
    odd = [rank for rank, call in calls.items() if call.compared != usual]
    if others and others[0][1] == count:  # no majority, so no rank is taken to be right
        odd = list(calls)
    listing = "".join(f"\n    rank {rank}: {call}" for rank, call in calls.items())
    who = f"{'ranks' if len(odd) > 1 else 'rank'} {', '.join(map(str, odd))}"
    return CollectiveError(
        "ranks that communicate do not do the same",
        found=f"call {checked.number + 1} of {checked.channel}: {who} "
        f"{'differ' if len(odd) > 1 else 'differs'}{listing}",
        fix="look at the lines named above: all ranks must come to the same calls, with the same "
        "shapes, in the same order",
    )


def _missing(checked: _CheckedCall, verdict: dict[str, object], *, late: int) -> CollectiveError:
    absent = verdict["absent"]
    assert isinstance(absent, dict)  # noqa: S101  # invariant: written by _gather
    listing = "".join(
        f"\n    rank {rank}, whose last call was {last}" for rank, last in absent.items()
    )
    problem = "a rank has not come to a call that others wait in"
    if str(late) in absent:
        problem = "this rank came to a call after others had given up waiting for it"
    return CollectiveError(
        problem,
        found=f"call {checked.number + 1} of {checked.channel}, {checked.own}; after "
        f"{verdict['s']:g} s rank {verdict['waiting']} still waited for{listing}",
        fix="look at what the missing rank does instead; if it only is slow, raise "
        "--check-collectives-seconds",
    )


def _store_is_gone(error: RuntimeError) -> PeerError:
    return PeerError(
        "the rank that hosts the rendezvous store is gone",
        found=first_line(error),
        fix="read the end of rank 0's log",
    )
