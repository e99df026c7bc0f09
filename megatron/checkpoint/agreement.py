"""One step run by every rank, and one result for all: each rank learns of another's failure.

Without this a rank that fails leaves the others waiting in their next collective. A step itself
must not communicate. Ranks whose process ends are detected by the collective's timeout, not here.
"""

import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from megatron import device
from megatron.checkpoint.files.durable import from_os_error
from megatron.errors import CheckpointError, MachineError, MegatronError, memory_ran_out
from megatron.mpu import collectives
from megatron.mpu.context import ParallelContext

T = TypeVar("T")
_SHOWN = 4  # failing ranks described before "and N more"


class _Outcome(NamedTuple):
    value: Any
    error: MegatronError | None


def run_on_all_ranks(ctx: ParallelContext, doing: str, step: Callable[[], T]) -> list[T]:
    """Call `step` on every rank; return all results in rank order, or raise on all.

    `doing` completes "while ..." in the message. All ranks must call this with the same `doing`.

    Raises:
        MegatronError: the step's own error, where it was the same on every rank.
        MachineError: the machines of some ranks failed, which may pass; the message names them.
        CheckpointError: some ranks failed otherwise. The same on every rank, and chained to its
            cause on those that failed.
    """
    cause: Exception | None = None
    try:
        outcome = _Outcome(step(), None)
    except Exception as error:
        cause = error
        outcome = _Outcome(None, _as_megatron_error(error, doing))
    outcomes = collectives.all_gather_object(outcome, ctx.world)
    failures = [(rank, o.error) for rank, o in enumerate(outcomes) if o.error is not None]
    if failures:
        verdict = _verdict(failures, ctx.world.size, doing)
        raise verdict from (cause if cause is not None and str(cause) != str(verdict) else None)
    return [each.value for each in outcomes]


def _as_megatron_error(error: Exception, doing: str) -> MegatronError:
    if isinstance(error, MegatronError):
        return error
    if isinstance(error, OSError):
        return from_os_error(error, doing)
    if device.is_out_of_memory(error):
        return memory_ran_out(error, doing)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return CheckpointError(
        f"{doing} failed by a defect of this program",
        found=f"{type(error).__name__}: {error} (line {last.lineno} of {last.filename})",
        fix="report it with the traceback of that rank",
    )


def _verdict(failures: list[tuple[int, MegatronError]], world: int, doing: str) -> MegatronError:
    first = failures[0][1]
    if len(failures) == world and len({(type(e), str(e)) for _, e in failures}) == 1:
        return first
    lines = [f"rank {rank}: {error.problem}; {error.found}" for rank, error in failures[:_SHOWN]]
    if len(failures) > _SHOWN:
        lines.append(f"and {len(failures) - _SHOWN} more ranks")
    ranks = ", ".join(str(rank) for rank, _ in failures[:_SHOWN])
    may_pass = all(isinstance(error, MachineError) for _, error in failures)
    kind = MachineError if may_pass else CheckpointError
    return kind(
        f"{'rank' if len(failures) == 1 else 'ranks'} {ranks} of {world} failed while {doing}",
        found="\n    ".join(lines),
        fix=first.fix,
    )
