"""The calls to Comet, against a stand-in for its large library."""

import io
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.trackers.comet import SERVICE, CometTracker
from tests.unit.trackers.runs import CONFIGS, NAME, VALUES, at, tracked_run


def _stand_in(monkeypatch: pytest.MonkeyPatch, **config: Any) -> list[tuple[str, Any]]:
    """Put a module in Comet's place; return the calls that it will receive."""
    calls: list[tuple[str, Any]] = []

    def start(**asked: Any) -> SimpleNamespace:
        calls.append(("start", asked))
        return SimpleNamespace(
            log_parameters=lambda values: calls.append(("parameters", values)),
            log_metrics=lambda values, step: calls.append(("metrics", (values, step))),
            end=lambda: calls.append(("end", None)),
        )

    found = {"comet.start.online": None, "comet.api_key": None} | config
    module = SimpleNamespace(start=start, ExperimentConfig=dict, get_config=lambda: found)
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    return calls


def test_an_experiment_is_continued_by_the_name_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _stand_in(monkeypatch)
    tracker = CometTracker(tracked_run(comet_project="tiny"))
    tracker.log_scalars(VALUES, at(3))
    tracker.close()
    (_, asked), *rest = calls
    recorded = asked.pop("experiment_config")
    assert asked == {"project_name": "tiny", "experiment_key": NAME, "mode": "get_or_create"}
    assert not any(recorded.values()), "nothing is recorded but what we hand over"
    assert rest == [("parameters", CONFIGS), ("metrics", (VALUES, 3)), ("end", None)]


def test_its_messages_do_not_repeat_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch, **{"comet.api_key": "s3cret"})
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    monkeypatch.setattr(logging.getLogger("comet_ml"), "handlers", [handler])
    CometTracker(tracked_run(comet_project="tiny"))
    logging.getLogger("comet_ml.connection").error("the given key %r is invalid", "s3cret")
    assert said.getvalue() == "the given key '(redacted)' is invalid\n"


def test_only_a_run_that_is_sent_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch)
    assert SERVICE.problem() == "no API key in COMET_API_KEY or Comet's configuration file"
    for config in ({"comet.start.online": False}, {"comet.api_key": "k"}):
        _stand_in(monkeypatch, **config)
        assert SERVICE.problem() is None
