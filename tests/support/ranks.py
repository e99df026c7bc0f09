"""Runs a test body on several gloo processes and brings every rank's result back.

Processes come from a forkserver that has torch imported, so they start in milliseconds. A reader
might miss that the environment of the forkserver is that of its first use.
"""

from __future__ import annotations

import copyreg
import faulthandler
import io
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from unittest.mock import patch

from tests.support.warm_python import PRELOAD_DEEPSPEED

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

_MODULES = [
    "pytest",
    "numpy",
    "torch",
    "torch.distributed",
    "torch.utils.checkpoint",
    "megatron.mpu.context",
    "torch._dynamo",  # which the first optimizer of a process imports, in seconds
    "megatron.training",
    "megatron.engine.datasets",
    "megatron.data.loading.gpt_batch",
    "megatron.model.gpt_model",
    "megatron.tokenizer.plain",
    "torch.profiler._cupti_monitor",
    "sklearn.metrics",  # of tasks
    "scipy.stats",
    "tests.support.tiny",
]
_DEEPSPEED_MODULES = [
    *_MODULES,
    *PRELOAD_DEEPSPEED,
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.ep_repack",
    "deepspeed.ops.triton_ops",
    "megatron.engine.deepspeed.engine",
    "megatron.engine.deepspeed.pipe_engine",
]
_LAST = "tests.support.frozen"  # after all other imports
PRELOAD = [*_MODULES, _LAST]  # of the forkserver, which all tests of a process share
_LAST_WORDS_S = 5.0  # how long a dead rank's result may take to arrive, and a live one to end


class _Outcome(NamedTuple):
    """What a rank sent: its body's value, or the traceback of what it raised."""

    at: float  # CLOCK_MONOTONIC, which all processes of a machine share
    ok: bool
    value: Any


class _Rank(NamedTuple):
    process: BaseProcess
    results: Connection


def run_on_ranks(
    world_size: int,
    body: Callable[..., T],
    *args: Any,
    timeout_s: float = 60,
    deepspeed: bool = False,
) -> list[T]:
    """Call `body(*args)` on `world_size` gloo processes; return the results in rank order.

    `body` must be a module-level function; it, `args` and the results travel by pickle. A rank
    that raises, dies or does not return within `timeout_s` is an AssertionError. The first rank to
    fail is the one reported, with its traceback: the others are usually only waiting for it.

    Args:
        deepspeed: the body trains through DeepSpeed; its ranks come from a forkserver of their own,
            which has imported it.
    """
    start = mp.get_context("forkserver")
    start.set_forkserver_preload(PRELOAD)
    ranks: list[_Rank] = []
    # Plain pickle copies tensors; multiprocessing's own would share memory with a process that
    # has ended by the time the other side looks.
    task = pickle.dumps((body, args))
    with tempfile.TemporaryDirectory() as directory:
        place = (world_size, str(Path(directory) / "store"), timeout_s)
        try:
            for rank in range(world_size):
                receive, send = start.Pipe(duplex=False)
                process = start.Process(
                    target=_rank_main, args=(rank, *place, send, task), name=f"rank {rank}"
                )
                with _forkserver_with_deepspeed() if deepspeed else nullcontext():
                    process.start()
                send.close()  # so that the pipe ends when the rank does
                ranks.append(_Rank(process, receive))
            return _collect(ranks, timeout_s)
        finally:
            for rank_ in ranks:
                rank_.process.kill()
                rank_.process.join()
                rank_.results.close()


@contextmanager
def _forkserver_with_deepspeed() -> Iterator[None]:
    """Processes started inside come from a second server, so that no other test waits for it."""
    with patch.object(
        forkserver, "connect_to_new_process", _second_server().connect_to_new_process
    ):
        yield


@lru_cache(maxsize=1)
def _second_server() -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*_DEEPSPEED_MODULES, _LAST])
    with patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}):  # or its import warns of the choice
        server.ensure_running()
    return server


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    waiting = {ranks[rank].results: rank for rank in range(len(ranks))}
    results: dict[int, Any] = {}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(waiting.values())
            raise AssertionError(f"ranks {missing} gave no result within {timeout_s:.0f} s")
        # A rank that died without an error is seen by the end of its pipe. Those that failed
        # because of it report that a moment later, and are listed after it.
        received = {waiting.pop(pipe): _receive(pipe) for pipe in ready}  # type: ignore[call-overload]
        dead = [rank for rank, outcome in received.items() if outcome is None]
        ended = {rank: outcome for rank, outcome in received.items() if outcome is not None}
        failed = sorted((o.at, rank) for rank, o in ended.items() if not o.ok)
        if dead:
            ranks[dead[0]].process.join(_LAST_WORDS_S)
            code = ranks[dead[0]].process.exitcode
            others = "".join(
                f"\nrank {r} failed then or before:\n{ended[r].value}" for _, r in failed
            )
            raise AssertionError(
                f"rank {dead[0]} of {len(ranks)} died with exit code {code}{others}"
            )
        if failed:
            _, first = failed[0]
            raise AssertionError(
                f"rank {first} of {len(ranks)} failed first:\n{ended[first].value}"
            )
        results.update({rank: outcome.value for rank, outcome in ended.items()})
    _join(ranks)
    return [results[rank] for rank in range(len(ranks))]


def _receive(pipe: Any) -> _Outcome | None:
    try:
        return _Outcome(*pickle.loads(pipe.recv_bytes()))
    except EOFError:
        return None


def _join(ranks: list[_Rank]) -> None:
    """A rank that crashes after its result has still failed the test."""
    for rank, (process, _) in enumerate(ranks):
        process.join(_LAST_WORDS_S)
        if process.exitcode:
            raise AssertionError(
                f"rank {rank} of {len(ranks)} died with exit code {process.exitcode} at its end"
            )


def _rank_main(
    rank: int,
    world_size: int,
    store: str,
    timeout_s: float,
    send: Connection,
    task: bytes,
) -> None:
    # Imported here: this module is read by pytest too, which need not wait for torch.
    import torch
    import torch.distributed as dist

    # If the test process is killed, no other process ends this one.
    faulthandler.dump_traceback_later(timeout_s + _LAST_WORDS_S, exit=True)
    torch.set_num_threads(1)
    # Processes that a rank starts (loader workers) start as they would from a program.
    mp.set_start_method(None, force=True)  # type: ignore[arg-type]  # documented
    code = 0
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        # A rank that was done at once would close connections that others are still making.
        dist.barrier()
        body, args = pickle.loads(task)
        _send(send, True, body(*args))
    except BaseException:  # SystemExit and KeyboardInterrupt are outcomes of a body, too
        _send(send, False, traceback.format_exc())
        code = 1
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # A gloo thread that drops a tensor while the interpreter shuts down aborts the process
    # (seen in 16 of 200 exits, torch 2.13), so there is no shutdown.
    os._exit(code)


def _send(send: Connection, ok: bool, value: Any) -> None:
    import torch

    packed = io.BytesIO()
    pickler = pickle.Pickler(packed)
    # Torch writes each tensor as a file of its own, which takes longer than all else that is sent.
    pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduced}
    pickler.dump((time.monotonic(), ok, value))
    send.send_bytes(packed.getbuffer())


def _reduced(tensor: Tensor) -> Any:
    import torch

    if tensor.requires_grad or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]
    values = tensor.contiguous().reshape(-1).view(torch.uint8)
    return _tensor, (bytes(values.numpy()), tensor.dtype, tensor.shape)


def _tensor(values: bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    import torch

    if not values:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(values), dtype=dtype).view(shape)
