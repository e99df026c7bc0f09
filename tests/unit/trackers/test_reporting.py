"""A tracker that fails is dropped and said once; keys stay where they are needed."""

from collections.abc import Mapping

import pytest

from megatron.config.trackers import TrackersConfig
from megatron.progress import Progress
from megatron.trackers import reporting
from megatron.trackers.reporting import Trackers, open_trackers, secrets_not_needed, writing_rank
from megatron.trackers.tracker import Service, TrackedRun
from tests.support.tiny import tiny_run
from tests.unit.trackers.runs import VALUES, at, tracked_run


class _Recorder:
    def __init__(self, fails_at: int | None = None, *, fails_to_close: bool = False) -> None:
        self.steps: list[int] = []
        self._fails_at, self._fails_to_close = fails_at, fails_to_close

    def log_scalars(self, values: Mapping[str, float], at: Progress) -> None:
        self.steps.append(at.iteration)
        if at.iteration == self._fails_at:
            raise ConnectionError("no answer from http://me:s3cret@host")

    def close(self) -> None:
        self.steps.append(-1)
        if self._fails_to_close:
            raise TimeoutError("too slow")


def test_a_tracker_that_fails_is_said_once_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing, late, good = _Recorder(2), _Recorder(fails_to_close=True), _Recorder()
    trackers = Trackers({"one": failing, "two": late, "three": good})
    for step in (1, 2, 3, 4):
        trackers.log_scalars(VALUES, at(step))
    trackers.close()
    assert (failing.steps, good.steps) == ([1, 2], [1, 2, 3, 4, -1])
    said = capsys.readouterr().err
    assert said.count("one records nothing from here on; the run continues without it") == 1
    assert said.count("two records nothing") == 1
    assert "ConnectionError: no answer from http://(redacted)@host" in said
    assert "s3cret" not in said


def test_a_tracker_that_does_not_open_is_said_and_the_others_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = _Recorder()

    def refuse(run: TrackedRun) -> _Recorder:
        raise PermissionError(f"{run.trackers.wandb_project} is not yours")

    services = (
        Service("bad", "wandb_project", "wandb", (), refuse),
        Service("good", "comet_project", "comet_ml", (), lambda run: good),
        Service("not asked for", "trackio_project", "trackio", (), refuse),
    )
    monkeypatch.setattr(reporting, "SERVICES", services)
    trackers = open_trackers(tracked_run(wandb_project="theirs", comet_project="ours"))
    trackers.log_scalars(VALUES, at(1))
    assert good.steps == [1]
    said = capsys.readouterr().err
    assert said.count("records nothing") == 1
    assert "bad records nothing from here on" in said


def test_the_last_rank_writes_unless_another_is_named() -> None:
    assert writing_rank(TrackersConfig(), 4) == 3
    assert writing_rank(TrackersConfig(tracker_rank=0), 4) == 0


def test_ranks_that_do_not_write_keep_no_key_of_what_is_asked_for() -> None:
    last = tiny_run("nowhere", wandb_project="p", mlflow_experiment="e")
    secrets = ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")
    assert [secrets_not_needed(last, rank, 3) for rank in range(3)] == [secrets, secrets, ()]
    first = tiny_run("nowhere", comet_project="p", tracker_rank=0)
    assert [secrets_not_needed(first, rank, 2) for rank in range(2)] == [(), ("COMET_API_KEY",)]
    assert secrets_not_needed(tiny_run("nowhere"), 0, 2) == ()
