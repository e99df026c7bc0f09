"""Comet. COMET_START_ONLINE=false writes archives, which `comet upload` sends later."""

import logging
from collections.abc import Mapping

from megatron.log import REDACTED
from megatron.progress import Progress
from megatron.trackers.tracker import Service, TrackedRun


class CometTracker:
    """One experiment of a project."""

    def __init__(self, run: TrackedRun) -> None:
        """Begin the experiment, or continue the one of this key.

        Terminal, command line, code, git and environment of the run are not recorded.
        """
        import comet_ml

        key = comet_ml.get_config()["comet.api_key"]
        for handler in logging.getLogger("comet_ml").handlers if key else ():
            handler.addFilter(_WithoutKey(key))
        self._experiment = comet_ml.start(
            project_name=run.trackers.comet_project,
            experiment_key=run.name,
            mode="get_or_create",
            experiment_config=comet_ml.ExperimentConfig(
                auto_output_logging=False,
                parse_args=False,
                log_code=False,
                log_git_metadata=False,
                log_git_patch=False,
                log_env_details=False,
                display_summary_level=0,
            ),
        )
        self._experiment.log_parameters(dict(run.configs))

    def log_scalars(self, values: Mapping[str, float], at: Progress) -> None:
        """Hand the numbers to a thread."""
        self._experiment.log_metrics(dict(values), step=at.iteration)

    def close(self) -> None:
        """Wait until all is written or sent."""
        self._experiment.end()


class _WithoutKey(logging.Filter):
    """Takes the key out of Comet's own messages, which repeat one that is refused."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = record.getMessage().replace(self._key, REDACTED), ()
        return True


def _problem() -> str | None:
    import comet_ml

    found = comet_ml.get_config()
    if found["comet.start.online"] is not False and not found["comet.api_key"]:
        return "no API key in COMET_API_KEY or Comet's configuration file"
    return None


SERVICE = Service("Comet", "comet_project", "comet_ml", ("COMET_API_KEY",), CometTracker, _problem)
