"""Monitors get the loss of the whole batch, and nothing is written where none is enabled."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.engine.base import StepReport
from megatron.engine.deepspeed.monitor import write_monitors


@pytest.mark.parametrize("enabled", [True, False])
def test_monitors_that_are_enabled_hear_loss_and_norm(enabled: bool) -> None:
    events: list[Any] = []
    monitor = SimpleNamespace(enabled=enabled, write_events=events.extend)
    write_monitors(
        SimpleNamespace(monitor=monitor, global_samples=24), StepReport(loss=2.5, grad_norm=0.5)
    )
    expected = [("Train/Samples/train_loss", 2.5, 24), ("Train/Samples/grad_norm", 0.5, 24)]
    assert events == (expected if enabled else [])
