"""MLflow, through the client of mlflow-skinny: a server, a database, or a folder.

A folder wants MLFLOW_ALLOW_FILE_STORE=true in the environment, and a database the whole of mlflow.
Names of values may hold neither `=`, `,` nor parentheses there; they become `_`.
"""

import re
import time
from collections.abc import Mapping
from typing import Any

from megatron.progress import Progress
from megatron.trackers.tracker import Service, TrackedRun

_NAME_TAG = "megatron.run"


class MlflowTracker:
    """One run of an experiment."""

    def __init__(self, run: TrackedRun) -> None:
        """Begin the run, or continue the one that has this name as a tag."""
        from mlflow.tracking import MlflowClient

        title = run.trackers.mlflow_experiment or ""
        self._client: Any = MlflowClient(tracking_uri=run.trackers.mlflow_tracking_uri)
        experiment = self._client.get_experiment_by_name(title)
        where = experiment.experiment_id if experiment else self._client.create_experiment(title)
        found = self._client.search_runs([where], f"tags.`{_NAME_TAG}` = '{run.name}'")
        tags = {_NAME_TAG: run.name}
        self._id = (found[0] if found else self._client.create_run(where, tags=tags)).info.run_id
        self._client.update_run(self._id, status="RUNNING")
        for name, values in run.configs.items():
            self._client.log_dict(self._id, dict(values), f"{name}.json")
        self._sent: Any = None

    def log_scalars(self, values: Mapping[str, float], at: Progress) -> None:
        """Hand the numbers to a thread, once it is done with those before."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch = [
            Metric(re.sub(r"[^\w.:/ -]", "_", name), value, now, at.iteration)
            for name, value in values.items()
        ]
        self._wait()
        self._sent = self._client.log_batch(self._id, metrics=batch, synchronous=False)

    def close(self) -> None:
        """Wait until all is written, and end the run."""
        self._wait()
        self._client.set_terminated(self._id)

    def _wait(self) -> None:
        if self._sent is not None:
            self._sent.wait()


SERVICE = Service(
    "MLflow",
    "mlflow_experiment",
    "mlflow",
    ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"),
    MlflowTracker,
)
