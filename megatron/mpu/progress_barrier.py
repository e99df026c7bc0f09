"""A barrier for work of any length: the others wait while a rank reports progress.

A collective that waits for a rank fails after minutes, and verifying or indexing a large corpus
takes hours. So ranks meet in the store that they share. What a reader would get wrong: only making
a `ProgressBarrier` is collective; `report_progress` never waits for anybody.
"""

import json
import secrets
import time
from typing import NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed's own, untyped there
    PrefixStore,
    Store,
)

from megatron import log
from megatron.errors import MachineError
from megatron.mpu.collectives import broadcast_object
from megatron.mpu.context import Group

_BEAT_S = 5.0  # between two writes to the store, however often a rank reports progress
_LOG_S = 30.0  # between two messages of a rank that waits
_LOOK_S = 5.0  # between two polls of the others' reports
_POLL_S = (0.01, 1.0)  # first and last pause between two polls of the count


class ProgressBarrier:
    """A barrier of all ranks of `group`, with reports of progress; all make it together.

    `patience_s` is the longest time without a report from any missing rank.
    """

    def __init__(self, group: Group, *, patience_s: float) -> None:
        self._ranks, self._rank, self._patience_s = group.ranks, group.rank, patience_s
        self._rounds = self._beats = 0
        self._beaten_at = -_BEAT_S
        self._store: Store | None = None
        if group.size > 1:
            # Another meeting of these processes must not find the traces of this one.
            name = broadcast_object(secrets.token_hex(8), group)
            shared = dist.distributed_c10d._get_default_store()
            self._store = PrefixStore(f"megatron/meeting/{name}", shared)

    def report_progress(self, doing: str) -> None:
        """Record what this rank is doing; cheap enough for an inner loop."""
        now = time.monotonic()
        if self._store is None or now - self._beaten_at < _BEAT_S:
            return
        self._beaten_at = now
        self._beats += 1
        self._store.set(f"report_progress/{self._rank}", json.dumps([self._beats, doing]))

    def wait(self) -> None:
        """Return once every rank has called this as often as this rank.

        Raises:
            MachineError: ranks are missing, and none of them reported for `patience_s`.
        """
        if self._store is None:
            return
        self._rounds += 1
        self._store.set(f"at/{self._rounds}/{self._rank}", "1")
        self._store.add(f"at/{self._rounds}", 1)
        started = looked = logged = changed_at = time.monotonic()
        pause, longest = _POLL_S
        absent: list[_Absent] = []
        while self._store.add(f"at/{self._rounds}", 0) < len(self._ranks):
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
            now = time.monotonic()
            if now - looked < min(_LOOK_S, self._patience_s / 4):
                continue
            looked, before = now, absent
            absent = self._reports_of_absent(self._store)
            if absent != before:
                changed_at = now
            if now - changed_at >= self._patience_s:
                raise MachineError(
                    "the ranks did not meet in time",
                    found=f"waited {now - started:.0f} s, the last {now - changed_at:.0f} s of it "
                    f"without a report, for {_named(absent)}",
                    fix="read the logs of those ranks; if they still work, allow more "
                    "--distributed-timeout-minutes",
                )
            if now - logged >= _LOG_S:
                logged = now
                log.info(f"waiting for {_named(absent)}, for {now - started:.0f} s now")

    def _reports_of_absent(self, store: Store) -> "list[_Absent]":
        """Return the last report of each rank that has not arrived."""
        found = []
        for place, rank in enumerate(self._ranks):
            if store.check([f"at/{self._rounds}/{place}"]):
                continue
            beats, doing = 0, ""
            if store.check([f"report_progress/{place}"]):
                beats, doing = json.loads(store.get(f"report_progress/{place}"))
            found.append(_Absent(rank, beats, doing))
        return found


class _Absent(NamedTuple):
    rank: int
    beats: int  # so that the same text reported twice counts twice
    doing: str


def _named(absent: list[_Absent]) -> str:
    shown = [f"rank {one.rank}" + (f" ({one.doing})" if one.doing else "") for one in absent[:8]]
    return ", ".join(shown) + (f" and {len(absent) - 8} more ranks" if len(absent) > 8 else "")
