"""--profile: a trace of some steps, and where their time went.

The ranks of --profile-ranks record, each into a file of its own in Chrome's format, through
torch.profiler. What stands in a trace under which name is decided where it is done (`spans.py`).
"""

from pathlib import Path
from types import TracebackType

from torch.profiler import ProfilerActivity, profile

from megatron import device, log, spans
from megatron.atomic import publish_file, temporary_name, write_error
from megatron.config.runtime import LoggingConfig
from megatron.loop.breakdown import breakdown
from megatron.loop.overlap import overlaps, read_trace
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import Group
from megatron.progress import Progress


class Profile:
    """Records the steps from --profile-step-start to --profile-step-end, counted before each.

    A hook after each step, which ends the recording, and the range of each. On leaving, what has
    been recorded is written, but not looked at: other ranks may be gone.
    """

    def __init__(self, flags: LoggingConfig, world: Group) -> None:
        self._flags, self._world = flags, world
        self._is_over = not flags.profile
        self._first = 0
        self._recording: profile | None = None

    def __enter__(self) -> "Profile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._recording is not None:
            self._write(last=None)

    def step(self, done: int) -> spans.Range:
        """Return the range of the step after so many; before it the recording begins if it is due.

        On no rank may a step run then (`precedes_next_step`).
        """
        flags = self._flags
        is_due = flags.profile_step_start <= done < flags.profile_step_end
        is_recorder = self._world.rank in flags.profile_ranks
        if is_due and is_recorder and not self._is_over and self._recording is None:
            activities = [ProfilerActivity.CPU]
            if device.current().type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._first = done + 1
            self._recording = profile(activities=activities)
            self._recording.start()
        return spans.span(f"step {done + 1}")

    def __call__(self, progress: Progress, step: object, /) -> Progress:
        """Write the traces after the last step of them; rank 0 says what they show."""
        if not self._is_over and progress.iteration >= self._flags.profile_step_end:
            self._is_over = True
            found = [] if self._recording is None else self._write(last=progress.iteration)
            for lines in all_gather_object(found, self._world):
                for line in lines:
                    log.info(line)
        return progress

    def precedes_next_step(self, progress: Progress) -> bool:
        """Return whether a recording begins or ends here, or would have in a skipped iteration."""
        flags, done = self._flags, progress.iteration
        begins_or_ends = done == flags.profile_step_start or done >= flags.profile_step_end
        return begins_or_ends and not self._is_over

    def _write(self, last: int | None) -> list[str]:
        """End the recording and write it; return lines about it.

        Raises:
            MachineError: the file cannot be written.
        """
        recording, self._recording = self._recording, None
        assert recording is not None  # noqa: S101  # invariant: callers have looked
        recording.stop()
        rank = self._world.rank
        folder = Path(self._flags.profile_folder)
        name = f"rank{rank}-step{self._first}-{'cut' if last is None else last}.pt.trace.json.gz"
        path = folder / name
        unfinished = temporary_name(path).with_suffix(".gz")  # by which torch compresses it
        try:
            folder.mkdir(parents=True, exist_ok=True)
            recording.export_chrome_trace(str(unfinished))
            publish_file(unfinished, path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise write_error(path, error) from error
        if last is None:
            return []
        steps = f"steps {self._first} to {last} of rank {rank}"
        events = read_trace(path)
        table = [f"{steps}: {line}" for line in breakdown(events).lines()]
        by_group = [f"{steps}, {group}" for group in overlaps(events)]
        return [f"{steps} are in {path}", *table, *by_group]
