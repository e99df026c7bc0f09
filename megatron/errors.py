"""What can go wrong in a run, by who has to act on it.

Every message has three parts: the problem, what was found (spelled as flags or paths), and a fix
that works. From the exit code a scheduler decides whether to start the same command again.
"""

import signal
from collections.abc import Iterable
from typing import NamedTuple

# Signals of the kernel, of libraries that abort and of schedulers that take a machine away. Those
# of a person at a terminal (SIGINT, SIGQUIT, SIGHUP) are not among them, nor those that the same
# program causes again on the same data (SIGFPE, SIGILL, SIGSYS).
_RETRYABLE_SIGNALS = frozenset(
    {
        signal.SIGKILL,
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGABRT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
_SHELL_SIGNALS = 128  # what a shell adds to the signal that ended a command

FIX_OF_MEMORY = (
    "start again if something else used the memory; otherwise tools/preflight.py with the "
    "flags of this run and --memory-gib finds the cheapest flags that need less"
)


class MegatronError(Exception):
    """An error whose message has a problem, what was found, and a fix."""

    exit_code: int = 1
    retryable: bool = False  # may a scheduler start the same command again, unchanged?

    def __init__(self, problem: str, *, found: object = None, fix: str) -> None:
        self.problem, self.found, self.fix = problem, found, fix
        super().__init__(problem)

    def __str__(self) -> str:
        lines = [self.problem]
        if self.found is not None:
            lines.append(f"found: {self.found}")
        lines.append(f"fix: {self.fix}")
        return "\n  ".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call cls(problem) and lose the keyword-only parts between processes.
        return (_rebuild, (type(self), self.problem, self.found, self.fix))


def _rebuild(kind: type[MegatronError], problem: str, found: object, fix: str) -> MegatronError:
    return kind(problem, found=found, fix=fix)


class ConfigError(MegatronError):
    """The flags contradict each other, the model they describe, or the available machines."""

    exit_code = 64


class DataError(MegatronError):
    """A dataset on disk is missing, damaged, or not what the flags describe."""

    exit_code = 65


class CheckpointError(MegatronError):
    """A checkpoint is missing, incomplete, damaged, or of another model."""

    exit_code = 66


class NumericsError(MegatronError):
    """The run itself went wrong: a non-finite loss, diverging replicas."""

    exit_code = 67


class RewindError(MegatronError):
    """The run ends to go on from an older checkpoint, past data that did it harm."""

    exit_code = 68
    retryable = True


class NotInitialisedError(MegatronError):
    """Something was asked for before `initialize_megatron()`, or it was called twice."""

    exit_code = 70


class CollectiveError(MegatronError):
    """Ranks that communicate do not do the same: a bug, or a rank that is stuck elsewhere."""

    exit_code = 71


class MachineError(MegatronError):
    """The machine or the cluster failed: a full disk, a missing device, a lost network."""

    exit_code = 75
    retryable = True


def memory_ran_out(error: BaseException, doing: str | None = None) -> MachineError:
    """Return what an allocation that failed means; `doing` completes "while ..."."""
    return MachineError(
        "memory ran out" if doing is None else f"memory ran out while {doing}",
        found=first_line(error),
        fix=FIX_OF_MEMORY,
    )


class PeerError(MegatronError):
    """Another rank failed; the reason is in that rank's message."""

    exit_code = 76
    retryable = True


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type's name if there is none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def is_retryable(status: int) -> bool:
    """Return whether the same command is worth another start after it ended with `status`.

    Args:
        status: an exit code; the negative of a signal, as `subprocess` has it; or 128 plus a
            signal, as shells and containers have it.
    """
    if status < 0 or status > _SHELL_SIGNALS:
        number = -status if status < 0 else status - _SHELL_SIGNALS
        return number in _RETRYABLE_SIGNALS
    kinds = MegatronError.__subclasses__()
    return any(kind.retryable for kind in kinds if kind.exit_code == status)


class Finding(NamedTuple):
    """One thing that a check found wrong; `check` is the check's name, which is its title."""

    check: str
    error: MegatronError


class PreflightError(MegatronError):
    """Everything that is wrong with one launch, reported together.

    Findings of one class end the program as that class does; of several, as a ConfigError does,
    since a user has to act before the same command may work.
    """

    exit_code = ConfigError.exit_code

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        if len({type(error) for _, error in self.findings}) == 1:
            only = self.findings[0].error
            self.exit_code, self.retryable = only.exit_code, only.retryable
        count = len(self.findings)
        super().__init__(
            f"{count} {'check' if count == 1 else 'checks'} failed before training",
            fix="see each",
        )

    def __str__(self) -> str:
        return "\n".join([self.problem, *(f"[{check}] {error}" for check, error in self.findings)])

    def __reduce__(self) -> tuple[object, ...]:
        return (PreflightError, (self.findings,))
