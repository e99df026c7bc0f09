"""MLflow's own file store, written by our tracker and read back by its client."""

from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from megatron.trackers.mlflow import MlflowTracker
from tests.unit.trackers.runs import LOSS, VALUES, at, tracked_run


def test_a_resumed_run_is_one_run_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = tracked_run(mlflow_experiment="tiny", mlflow_tracking_uri=tmp_path.as_uri())
    for step in (3, 4):
        tracker = MlflowTracker(run)
        tracker.log_scalars(VALUES, at(step))
        tracker.close()
    client = MlflowClient(tracking_uri=tmp_path.as_uri())
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    points = client.get_metric_history(found.info.run_id, LOSS)
    assert [(point.step, point.value) for point in points] == [(3, 2.5), (4, 2.5)]
    # it accepts no `=` and no comma
    assert set(found.data.metrics) == {LOSS, "steps-vs-samples/y_samples_x_steps"}
    assert '"lr": 1.5' in next(tmp_path.rglob("flags.json")).read_text()
