"""Checks at the start, not at the first save, that ranks of several nodes see one folder.

A folder of the same name on each node's own disk would hold a part of every checkpoint on each.
What a reader would get wrong: network file systems show other nodes a new file only after a while.
"""

import secrets
import time
from contextlib import suppress
from pathlib import Path

from megatron import log
from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.checkpoint.files.store import place, write_object
from megatron.errors import CheckpointError
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import ParallelContext

PATIENCE_S = 45.0  # NFS may cache for 30 s (acdirmin) that a name does not exist
_PAUSE_S = 0.25


def refuse_separate_disks(
    folder: str, ctx: ParallelContext, *, patience_s: float = PATIENCE_S
) -> None:
    """Check that every rank sees a file that rank 0 writes to `folder`; it is removed again.

    Raises:
        CheckpointError: on every rank, naming those that do not see it.
    """
    name = f".seen-{all_gather_object(secrets.token_hex(8), ctx.world)[0]}"
    where = place(folder)
    missing = []
    if isinstance(where, Path):
        missing = [path for path in (where, *where.parents) if not path.exists()]

    def write() -> None:
        if ctx.rank == 0:
            if isinstance(where, Path):
                where.mkdir(parents=True, exist_ok=True)
            write_object(where / name, b"seen")

    def is_visible() -> bool:
        until = time.monotonic() + patience_s
        while not (where / name).exists():
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSE_S)
        return True

    try:
        run_on_all_ranks(ctx, "writing to the folder for checkpoints", write)
        seen = run_on_all_ranks(ctx, "looking into the folder for checkpoints", is_visible)
    finally:
        if ctx.rank == 0:
            try:
                (where / name).unlink(missing_ok=True)
            except OSError as error:
                log.warning(f"{where / name} is left behind: {error}")
            for path in missing:
                with suppress(OSError):  # in use by another run by now
                    path.rmdir()
    failed = [rank for rank, sees in enumerate(seen) if not sees]
    if failed:
        raise CheckpointError(
            "the nodes do not see one folder for checkpoints",
            found=f"{where}: what rank 0 wrote is not there for {len(failed)} of {len(seen)} "
            f"ranks, the first of them rank {failed[0]}",
            fix="give --save a folder of a file system that all nodes share, or an address (s3://)",
        )
