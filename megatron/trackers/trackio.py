"""trackio: a database on this machine's disk, in the folder that TRACKIO_DIR names."""

from collections.abc import Mapping

from megatron.progress import Progress
from megatron.trackers.tracker import Service, TrackedRun


class TrackioTracker:
    """One run of a project."""

    def __init__(self, run: TrackedRun) -> None:
        """Begin the run, or continue the one of this name."""
        import trackio

        self._run = trackio.init(
            project=run.trackers.trackio_project,
            name=run.name,
            resume="allow",
            config=dict(run.configs),
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log_scalars(self, values: Mapping[str, float], at: Progress) -> None:
        """Hand the numbers to a thread."""
        self._run.log(dict(values), step=at.iteration)

    def close(self) -> None:
        """Wait until all is written."""
        self._run.finish()


SERVICE = Service("trackio", "trackio_project", "trackio", (), TrackioTracker)
