"""The outermost frame of a program: which rank prints, how a failure is shown, exit codes.

A known error is printed once, without a traceback; a bug is printed with one. Either way the other
ranks are notified, and this process ends at once: waiting for peers at exit is how jobs hang.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from megatron import log
from megatron.errors import MegatronError, PeerError, PreflightError, first_line, memory_ran_out
from megatron.launch import (
    launch_from_environment,
    report_to_torchrun,
    secrets_in_environment,
)
from megatron.peers.stacks import raised_in_communication

_MOST_OF_A_TRACEBACK = 3000  # its end, where the error and its worker's traceback stand

_REASON_S = 3.5  # in which the watch of other ranks finds out why one of them is gone
_ON_FAILURE: list[Callable[[str], None]] = []


def on_failure(notify: Callable[[str], None]) -> Callable[[], None]:
    """Call `notify(reason)` when this process fails, before it ends (to warn the other ranks).

    Returns:
        What takes this back, once.
    """
    _ON_FAILURE.append(notify)
    return lambda: _ON_FAILURE.remove(notify)


def run_program(main: Callable[[], object]) -> NoReturn:
    """Run a program's `main` and end the process with the exit status of its outcome."""
    log.hide(secrets_in_environment().values())
    try:
        launch = launch_from_environment()
        log.configure(launch.rank, launch.world_size)
        main()
    except MegatronError as error:
        # Flags and files are checked alike on every rank, so only rank 0 prints the errors.
        printed_by_rank0 = isinstance(error, PreflightError) and not log.is_rank_zero()
        # Notes hold what happened where this rank could not see it: a worker's traceback.
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        if not printed_by_rank0:
            log.error(text)
        _fail(f"{type(error).__name__}: {text}", error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted from the keyboard", 130)
    except SystemExit as leaving:  # argparse's --help and --version
        raise leaving
    except BaseException as error:
        trace = traceback.format_exc()
        if (known := _meaning(error)) is not None:
            log.error(f"{known}\n{trace}")
            _fail(f"{type(known).__name__}: {known}", known.exit_code)
        log.error(f"unexpected failure\n{trace}")
        # The others end with it in their logs too: which log is read first is chance.
        _fail(f"a bug; see that rank's traceback\n{trace[-_MOST_OF_A_TRACEBACK:]}", 1)
    raise SystemExit(0)


def _meaning(error: BaseException) -> MegatronError | None:
    """Return what an exception of a library means; None: a bug."""
    if _is_out_of_memory(error):
        return memory_ran_out(error)
    if not raised_in_communication(error):
        return None
    time.sleep(_REASON_S)  # the watch ends this process first if it knows why a rank is gone
    return PeerError(
        "communication with the other ranks failed",
        found=first_line(error),
        fix="read the message of the rank that ended first; if no rank says anything, one was "
        "killed (out of memory?) or the network between the nodes failed: start the job again",
    )


def _is_out_of_memory(error: BaseException) -> bool:
    from megatron.device import is_out_of_memory  # with torch, which an early end does without

    return is_out_of_memory(error)


def _fail(reason: str, status: int) -> NoReturn:
    reason = log.masked(reason)
    try:  # first: torchrun compares the times of these files
        report_to_torchrun(reason, status)
    except OSError as error:
        log.error(f"torchrun's summary will lack this failure: {error}")
    for notify in _ON_FAILURE:
        notify(reason)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a normal exit would wait for threads that wait for ranks that are gone
