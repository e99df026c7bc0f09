"""The one `Runtime` of this process, for user programs that cannot pass it on.

Library code below the training edge never reads from here; it is given what it needs. Set by
`initialize_megatron`, cleared by `shutdown_megatron`.
"""

import os
from dataclasses import dataclass, field

from megatron.config.run import FlatView, RunConfig
from megatron.errors import NotInitialisedError
from megatron.launch import Launch
from megatron.loop.spikes import RecentLosses
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams
from megatron.peers.activity import Activity
from megatron.timers import Timers
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.trackers.tracker import RunName


@dataclass(frozen=True, slots=True)
class Runtime:
    """The state of an initialised process: its flags, groups, timers, tokenizer and run."""

    config: RunConfig
    launch: Launch
    context: ParallelContext
    streams: RandomStreams
    tokenizer: Tokenizer
    timers: Timers
    initialised_at: str  # file:line of the call, for the error of a second one
    process: int  # pid: a forked child has not initialised anything
    run_name: RunName = field(default_factory=RunName)
    recent: RecentLosses = field(default_factory=RecentLosses)
    activity: Activity = field(default_factory=Activity)  # of the main thread, as peers see it


_runtime: Runtime | None = None


def set_runtime(runtime: Runtime) -> None:
    """Set the runtime of this process.

    Raises:
        NotInitialisedError: if there already is one; it names the call that made it.
    """
    global _runtime
    refuse_second_initialisation(runtime.initialised_at)
    _runtime = runtime


def refuse_second_initialisation(site: str) -> None:
    """Raise if `initialize_megatron` has already run in this process."""
    if _runtime is not None and _runtime.process == os.getpid():
        raise NotInitialisedError(
            "initialize_megatron() was called twice in one process",
            found=f"first at {_runtime.initialised_at}, again at {site}",
            fix="call it once, or call shutdown_megatron() in between",
        )


def clear_runtime() -> None:
    """Remove the runtime, so that another may be made."""
    global _runtime
    _runtime = None


def get_runtime() -> Runtime:
    """Return the runtime of this process.

    Raises:
        NotInitialisedError: before `initialize_megatron()`, and in a forked child.
    """
    if _runtime is None or _runtime.process != os.getpid():
        raise NotInitialisedError(
            "Megatron is not initialised in this process",
            found=f"process {os.getpid()}"
            + ("" if _runtime is None else f", initialised in process {_runtime.process}"),
            fix="call initialize_megatron() first, in this process",
        )
    return _runtime


def get_args() -> FlatView:
    """Return the run's flags as Megatron's flat, read-only namespace."""
    return get_runtime().config.flat()


def get_timers() -> Timers:
    """Return the named timers of this process."""
    return get_runtime().timers


def get_tokenizer() -> Tokenizer:
    """Return the tokenizer that the run's flags name."""
    return get_runtime().tokenizer
