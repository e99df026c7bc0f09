"""Background saves: training stops only while its state is copied to host memory.

A thread of each rank writes and never communicates. All agreement happens on the main thread, in
`poll` between two steps: whether all have written, then whether rank 0 has put the checkpoint in
place. So messages of a save cannot interleave with those of the training. One save is under way at
a time; a failure is raised by the next `poll`, the same on every rank. Such a thread also allocates
the memory for the copy when the run begins, so that no save has to wait for it.
"""

import contextvars
import errno
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch

from megatron import device, log
from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.checkpoint.files.durable import CANCELLED
from megatron.checkpoint.files.store import Place
from megatron.checkpoint.files.threads import this_host, threads_of_this_rank
from megatron.checkpoint.folder.retention import KEEP_ALL, Retention
from megatron.checkpoint.formats.native import sharded
from megatron.checkpoint.formats.native.sharded import PieceKey, WrittenPart
from megatron.checkpoint.save.host_copy import HostMemory, copied_bytes, memory_taken
from megatron.checkpoint.save.saving import (
    Saved,
    StagedSave,
    prepare_save,
    run_on_rank0,
    share_of,
    writing,
)
from megatron.checkpoint.sharded import ShardedTensor, Snapshot
from megatron.errors import ConfigError, MegatronError
from megatron.host import available_memory_bytes
from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import ParallelContext

_POLL_PAUSE_S = (0.002, 0.5)  # first and longest pause between two polls of a rank that waits
_LOGGED_WAIT_S = 0.1
_JOIN_TIMEOUT_S = 10.0  # how long a run that fails waits for its own thread


class _Work:
    """A call in a thread of its own; `result` is its value, or raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._value = call, None
        self._error: BaseException | None = None
        self._cancelled = threading.Event()
        context = contextvars.copy_context()
        # A daemon: a process that fails must not wait for a disk that hangs.
        self._thread = threading.Thread(
            target=lambda: context.run(self._run), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        CANCELLED.set(self._cancelled)
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        return self.is_done and self._error is not None

    def cancel(self) -> None:
        """Cancel the call: it fails at the next block that it writes."""
        self._cancelled.set()

    def join(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def part(self) -> Any:
        """Return the result, or None if it was cancelled: another rank reports the error."""
        try:
            return self.result()
        except OSError as error:
            if error.errno == errno.ECANCELED:
                return None
            raise

    def result(self) -> Any:
        """Return what the call returned, or raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._value


class _Flight:
    """One save under way, as this rank sees it."""

    def __init__(self, stage: StagedSave, snapshot: Snapshot, work: _Work, stalled: float) -> None:
        self.stage, self.snapshot, self.work, self.stalled = stage, snapshot, work, stalled
        self.is_writing = True  # else rank 0 puts the checkpoint in place


class _MemoryRequest(NamedTuple):
    """Host memory that one rank needs, and the free memory of its host, if known."""

    host: str
    bytes: int
    free: int | None


class BackgroundSaves:
    """The saves of one run; make one on every rank, and call each method on all ranks together.

    A context manager: leaving it by an error abandons a save under way, and the former checkpoint
    stays. Otherwise `wait` has to be called before.
    """

    def __init__(self, ctx: ParallelContext) -> None:
        self._ctx, self._memory = ctx, HostMemory()
        self._flight: _Flight | None = None
        self._making: _Work | None = None  # memory, while a thread allocates it

    def __enter__(self) -> "BackgroundSaves":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        flight, self._flight = self._flight, None
        if self._making is not None:
            self._making.cancel()
            self._making.join(_JOIN_TIMEOUT_S)
        if flight is None:
            return
        if flight.is_writing:
            log.warning(
                f"the checkpoint of iteration {flight.stage.iteration} was being written and is "
                "given up; the one before it stays"
            )
            flight.work.cancel()
        flight.work.join(_JOIN_TIMEOUT_S)  # putting it in place takes moments

    def reserve(self, tensors: Iterable[ShardedTensor]) -> None:
        """Begin to allocate the host memory that saves of such `tensors` are copied to.

        A thread allocates it, and the first `start` waits for it. Without this call the first save
        allocates it.

        Raises:
            ConfigError: the ranks of a host need more than it has free. The same on every rank.
            CheckpointError: ranks disagree about the tensors. The same on every rank.
        """
        ctx = self._ctx
        share = share_of(Snapshot(tuple(tensors), progress={}, config={}), ctx=ctx)
        size = copied_bytes(share)
        doing = "looking for the host memory that --async-save needs"

        def request() -> _MemoryRequest:
            return _MemoryRequest(this_host(), memory_taken(size), available_memory_bytes())

        wanted = run_on_all_ranks(ctx, doing, request)
        run_on_all_ranks(ctx, doing, lambda: _require_memory(wanted, ctx.rank))
        self._memory.threads = threads_of_this_rank([one.host for one in wanted], ctx.rank)
        self._making = _Work(lambda: self._memory.make_room(size))

    def wait_for_memory(self) -> None:
        """Wait until the memory of `reserve` is allocated; does not communicate.

        Raises:
            MachineError: the system refuses it.
        """
        if self._making is not None:
            self._making.result()
            self._making = None

    def start(
        self,
        folder: str | Place,
        snapshot: Snapshot,
        *,
        iteration: int,
        retention: Retention = KEEP_ALL,
    ) -> None:
        """Copy `snapshot` to host memory and begin to write it as the checkpoint of `iteration`.

        Waits for the previous save, if that is still under way, and logs the wait.

        Raises:
            CheckpointError: the previous save has failed, or this one cannot begin.
        """
        started = time.monotonic()
        if self._flight is not None:
            before = self._flight.stage.iteration
            self.wait()
            if (seconds := time.monotonic() - started) >= _LOGGED_WAIT_S:
                log.warning(
                    f"the checkpoint of iteration {before} was not written when that of iteration "
                    f"{iteration} was due: training stood still for {seconds:.1f} s"
                )
        ctx = self._ctx
        stage = prepare_save(
            folder,
            snapshot,
            iteration=iteration,
            ctx=ctx,
            retention=retention,
        )

        def take() -> tuple[Snapshot, Mapping[PieceKey, str]]:
            self.wait_for_memory()
            share = sharded.share(snapshot, stage.plan, rank=ctx.rank)
            return self._memory.copy_of(share), stage.witnessed(snapshot, ctx.rank)

        copies: list[tuple[Snapshot, Mapping[PieceKey, str]]] = []
        try:
            run_on_all_ranks(ctx, "copying the state to host memory", lambda: copies.append(take()))
        except MegatronError:
            run_on_rank0(ctx, "removing what was written", stage.discard)
            raise
        ((copy, digests),) = copies
        work = _Work(lambda: stage.write(copy, ctx.rank)._replace(digests=digests))
        self._flight = _Flight(stage, copy, work, time.monotonic() - started)

    def poll(self) -> Saved | None:
        """Continue the save under way, without waiting; return its result once it is complete.

        Raises:
            CheckpointError: it has failed on some rank. Its files are removed, unless the message
                says otherwise, and the former checkpoint is unchanged.
        """
        flight = self._flight
        if flight is None:  # on all ranks, since all begin and end a save together
            return None
        started = time.monotonic()
        done, fine = self._agree(flight.work.is_done, not flight.work.has_failed)
        if not fine:
            flight.work.cancel()
        elif not done:
            flight.stalled += time.monotonic() - started
            return None
        saved = None
        try:
            if flight.is_writing:
                self._put_in_place(flight)
            else:
                saved = self._complete(flight)
        except MegatronError:
            self._flight = None
            raise
        flight.stalled += time.monotonic() - started
        return saved

    def wait(self) -> Saved | None:
        """Wait until no save is under way; return the last one's result. Raises as `poll` does."""
        pause, longest = _POLL_PAUSE_S
        saved = None
        while (flight := self._flight) is not None and saved is None:
            began = time.monotonic()
            flight.work.join(pause)
            flight.stalled += time.monotonic() - began
            pause = min(1.5 * pause, longest)
            saved = self.poll()
        return saved

    def _agree(self, *values: bool) -> list[bool]:
        """Return which of `values` are true on all ranks."""
        votes = torch.tensor([float(one) for one in values], device=device.current())
        return [bool(one) for one in all_reduce(votes, self._ctx.world, op="min").tolist()]

    def _put_in_place(self, flight: _Flight) -> None:
        """Agree whether all ranks have written or one has failed; then rank 0 commits."""
        stage, snapshot, ctx = flight.stage, flight.snapshot, self._ctx
        try:
            parts: list[WrittenPart] = run_on_all_ranks(
                ctx, writing(stage.iteration), flight.work.part
            )
            sharded.check_replicas(parts)
        except MegatronError:  # the same on all ranks, and none is still writing
            run_on_rank0(ctx, "removing what was written", stage.discard)
            raise

        def finish() -> Saved:
            try:
                size = stage.describe(snapshot, parts).bytes
            except BaseException:
                stage.discard()
                raise
            directory = stage.commit()
            return stage.saved(directory, size, stage.retire())

        flight.work = _Work(finish if ctx.world.is_first else lambda: None)
        flight.is_writing = False

    def _complete(self, flight: _Flight) -> Saved:
        doing = f"putting the checkpoint of iteration {flight.stage.iteration} in place"

        saved: Saved = run_on_all_ranks(self._ctx, doing, flight.work.result)[0]
        self._flight = None
        seconds = time.monotonic() - flight.stage.started
        saved = saved._replace(seconds=seconds, stalled=flight.stalled)
        log.info(str(saved))
        return saved


def _require_memory(wanted: list[_MemoryRequest], rank: int) -> None:
    of_host = [one for one in wanted if one.host == wanted[rank].host]
    needed = sum(one.bytes for one in of_host)
    free = min((one.free for one in of_host if one.free is not None), default=None)
    if free is not None and needed > free:
        raise ConfigError(
            "the host has no memory for the copy of the state that --async-save writes from",
            found=f"{needed:,} bytes wanted by {len(of_host)} of its ranks, {free:,} free",
            fix="drop --async-save, or spread the run over more hosts",
        )
