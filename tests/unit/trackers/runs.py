"""A run for trackers to record, and a point of it."""

from typing import Any

from megatron.config.runtime import LoggingConfig
from megatron.config.trackers import TrackersConfig
from megatron.progress import Progress
from megatron.trackers.tracker import TrackedRun

NAME = "0123456789abcdef" * 2
CONFIGS = {"flags": {"optimizer": {"lr": 1.5}}}
LOSS = "lm-loss-training/lm loss"
SAMPLES = "steps-vs-samples/y=samples,x=steps"
VALUES = {LOSS: 2.5, SAMPLES: 24.0}


def tracked_run(logging: LoggingConfig | None = None, **flags: Any) -> TrackedRun:
    return TrackedRun(
        logging=logging or LoggingConfig(),
        trackers=TrackersConfig(**flags),
        name=NAME,
        configs=CONFIGS,
        first_iteration=1,
    )


def at(iteration: int) -> Progress:
    return Progress(
        iteration=iteration, consumed_samples=8 * iteration, consumed_tokens=128 * iteration
    )
