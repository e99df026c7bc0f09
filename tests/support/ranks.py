"""Runs a test body on several gloo processes and brings every rank's result back.

Processes are forked from a Python that has imported torch, so they start in milliseconds; their
environment is that of the process that calls.
"""

from __future__ import annotations

import selectors
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from tests.support.call import Call, Outcome

T = TypeVar("T")


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
        deepspeed: the body trains through DeepSpeed; its processes have imported it.
    """
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        place = (world_size, str(folder / "store"), timeout_s)
        ranks: list[Call] = []
        try:
            for rank in range(world_size):
                task = (_as_rank, rank, *place, body, args)
                ranks.append(Call(folder, f"rank {rank}", *task, deepspeed=deepspeed))
            return _collect(ranks, timeout_s)
        finally:
            for call in ranks:
                call.end()


def _collect(ranks: Sequence[Call], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    outcomes: dict[int, Outcome | None] = {}
    with selectors.DefaultSelector() as running:
        for rank, call in enumerate(ranks):
            running.register(call.process, selectors.EVENT_READ, rank)
        while running.get_map():
            ready = [key.data for key, _ in running.select(max(0.0, deadline - time.monotonic()))]
            for rank in ready:
                running.unregister(ranks[rank].process)
            # At the deadline: a rank may have a result and not be at its end.
            still_running = [key.data for key in running.get_map().values()]
            looked_at = ready or still_running
            outcomes.update({rank: ranks[rank].outcome for rank in looked_at})
            # The rank that failed first may end after one that failed because of it.
            known = outcomes | {rank: ranks[rank].outcome for rank in still_running}
            failed = sorted(
                (outcome.at, rank, str(outcome.value))
                for rank, outcome in known.items()
                if outcome is not None and not outcome.ok
            )
            # A rank that died without an error is seen by its end. Those that failed because of
            # it end a moment later, and are listed after it.
            for rank in ready:
                code = ranks[rank].process.wait()
                outcome = outcomes[rank]
                if outcome is None or (outcome.ok and code):
                    when = " at its end" if outcome else ""
                    others = "".join(
                        f"\nrank {other} failed then or before:\n{text}"
                        for _, other, text in failed
                    )
                    raise AssertionError(
                        f"rank {rank} of {len(ranks)} died with exit code {code}{when}{others}"
                    )
            if failed:
                _, first, text = failed[0]
                raise AssertionError(f"rank {first} of {len(ranks)} failed first:\n{text}")
            if not ready:
                missing = sorted(rank for rank in looked_at if outcomes[rank] is None)
                if missing:
                    raise AssertionError(f"ranks {missing} gave no result within {timeout_s:.0f} s")
                break
    return [outcome.value for _, outcome in sorted(outcomes.items()) if outcome is not None]


def _as_rank(
    rank: int,
    world_size: int,
    store: str,
    timeout_s: float,
    body: Callable[..., Any],
    args: Sequence[Any],
) -> Any:
    # Imported here: this module is read by pytest too, which need not wait for torch.
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    # A rank that was done at once would close connections that others are still making.
    dist.barrier()
    return body(*args)
