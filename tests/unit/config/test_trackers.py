"""What of the trackers is refused: a negative rank, and a password."""

import pytest

from megatron.config.trackers import TrackersConfig
from megatron.errors import ConfigError


def test_a_rank_is_counted_from_0() -> None:
    with pytest.raises(ConfigError, match="there is no such rank"):
        TrackersConfig(tracker_rank=-1)


def test_a_password_on_the_command_line_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="a password is on the command line") as caught:
        TrackersConfig(mlflow_tracking_uri="https://me:s3cret@host:5000/path")
    assert "s3cret" not in str(caught.value)
    assert caught.value.fix.startswith("use --mlflow-tracking-uri https://host:5000/path, and set")
    for fine in ("https://host:5000", "file:/home/me@work/runs", "databricks"):
        assert TrackersConfig(mlflow_tracking_uri=fine).mlflow_tracking_uri == fine
