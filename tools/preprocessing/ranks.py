"""Several processes of one tool, and how they hand each other small results: the launcher's store.

No process group and no GPU is used. What a reader would get wrong: every wait here ends, because
each rank sends heartbeats; a rank that fails sends the reason, and the others raise that as
PeerError wherever they wait or call `check`, so that they can clean up before they end.
"""

import json
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from megatron.errors import PeerError, first_line
from megatron.launch import (
    Launch,
    hosts_rendezvous,
    launch_from_environment,
    rendezvous_address,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_BEAT_S = 2.0
_SILENCE_S = 120.0  # after this, a rank without a heartbeat counts as dead
_POLL_S = 0.05
_CHECK_S = 1.0  # at most so often a rank at work looks whether another failed


class ToolRanks:
    """The ranks of a tool that were started together; a single one waits for no other.

    Use it as a context manager around everything that can fail: leaving it notifies the others.
    """

    def __init__(self, launch: Launch, store: "Store | None" = None) -> None:
        self.rank, self.size = launch.rank, launch.world_size
        self._store = store
        self._taken: dict[str, int] = {}  # what `take` gave, without a store
        self._looked = time.monotonic()
        self._watch = self._beat = None
        if store is not None:
            from megatron.peers.watch import PeerWatch  # with torch, which one process does without

            self._watch = PeerWatch(store, self.rank, self.size)
            self._beat = _Heartbeat(store, self.rank)

    @classmethod
    def join(cls) -> Self:
        """Join the other ranks, if a launcher started several."""
        launch = launch_from_environment()
        if launch.world_size == 1:
            return cls(launch)
        from megatron.peers.handshake import rendezvous_store  # with torch

        return cls(
            launch,
            rendezvous_store(
                rendezvous_address(launch), is_host=hosts_rendezvous(launch), within_s=_SILENCE_S
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self._beat is not None:
            self._beat.stop()
        if self._watch is not None:
            if kind is not None and not issubclass(kind, PeerError):
                self._watch.announce(f"{kind.__name__}: {error}")
            self._watch.close()

    @property
    def is_first(self) -> bool:
        """Whether this rank prints, and publishes the result of all ranks."""
        return self.rank == 0

    def gather(self, name: str, value: object) -> list[Any]:
        """Return every rank's value under `name`, in rank order and as JSON, on every rank."""
        if self._store is None:
            return [json.loads(json.dumps(value))]
        self._store.set(f"{name}/{self.rank}", json.dumps(value))
        return [self._await(f"{name}/{rank}", rank) for rank in range(self.size)]

    def gather_at_first(self, name: str, value: object) -> list[Any] | None:
        """Return the result of `gather` on the first rank; None, without waiting, on others."""
        if self.is_first or self._store is None:
            return self.gather(name, value)
        self._store.set(f"{name}/{self.rank}", json.dumps(value))
        return None

    def from_first(self, name: str, value: object) -> Any:
        """Return the first rank's value under `name`, on every rank."""
        if self._store is None:
            return json.loads(json.dumps(value))
        if self.is_first:
            self._store.set(f"{name}/0", json.dumps(value))
        return self._await(f"{name}/0", 0)

    def take(self, name: str) -> int:
        """Return the next number of a counter shared by all ranks: 0, 1, 2, each once."""
        if self._store is None:
            self._taken[name] = self._taken.get(name, 0) + 1
            return self._taken[name] - 1
        return int(self._store.add(name, 1)) - 1

    def check(self) -> None:
        """Raise PeerError if another rank has failed; cheap enough to call often."""
        if self._watch is not None and time.monotonic() - self._looked >= _CHECK_S:
            self._watch.check()
            self._looked = time.monotonic()

    def _await(self, key: str, rank: int) -> Any:
        assert self._store is not None  # noqa: S101  # invariant: alone, nothing is awaited
        changed_at, last = time.monotonic(), b""
        try:
            while not self._store.check([key]):
                self.check()
                report_progress = self._beat_of(rank)
                if report_progress != last:
                    changed_at, last = time.monotonic(), report_progress
                if time.monotonic() - changed_at > _SILENCE_S:
                    raise PeerError(
                        f"rank {rank} has sent nothing for {_SILENCE_S:.0f} s",
                        found="no result, and no heartbeat",
                        fix="look for its last words in its own output, then start all ranks "
                        "again (with --resume where the tool has it)",
                    )
                time.sleep(_POLL_S)
            return json.loads(self._store.get(key))
        except RuntimeError as error:
            raise PeerError(
                "the process that hosts the rendezvous store is gone",
                found=first_line(error),
                fix="read the end of rank 0's output; start all ranks again",
            ) from error

    def _beat_of(self, rank: int) -> bytes:
        assert self._store is not None  # noqa: S101  # invariant: as above
        key = f"report_progress/{rank}"
        return bytes(self._store.get(key)) if self._store.check([key]) else b""


class _Heartbeat:
    """Writes every other second that this rank is alive, over its own connection."""

    def __init__(self, store: "Store", rank: int) -> None:
        self._store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._rank = rank
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        number = 0
        with suppress(RuntimeError):  # the launcher is gone; the next word to it fails as well
            while True:
                number += 1
                self._store.set(f"report_progress/{self._rank}", str(number))
                if self._ended.wait(_BEAT_S):
                    return
