"""A rank that takes longer in its own work is named, at every kind of layout."""

import re
import time
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from megatron import log
from megatron.model.stage import PipelineStage
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run, train, write_tiny_corpus

SLOW_RANK = 1
USUAL_S = 0.01  # a pass of a stage, above what the tiny model takes
# Far above what a busy machine adds to the other rank's passes: 0.1 s of sleep for each pass.
FACTOR = 10
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"global_batch_size": 4},
    "tp": {"global_batch_size": 2, "tensor_model_parallel_size": 2},
    "pp": {"global_batch_size": 2, "pipeline_model_parallel_size": 2},
}


def reports_of_slowed_runs(corpus: str) -> dict[str, list[str]]:
    """Train with a rank whose passes take longer; the lines of each layout, on rank 0."""
    run = PipelineStage.run

    def slowed(self: PipelineStage, *args: Any) -> Any:
        time.sleep(USUAL_S * (FACTOR if dist.get_rank() == SLOW_RANK else 1))
        return run(self, *args)

    found = {}
    for layout, flags in LAYOUTS.items():
        lines: list[str] = []
        with patch.object(PipelineStage, "run", slowed), patch.object(log, "info", lines.append):
            train(tiny_run(corpus, train_iters=4, straggler_report_interval=2, **flags))
        found[layout] = [line for line in lines if line.startswith("stragglers")]
    return found


def test_the_rank_that_is_slow_in_its_own_work_is_named(tmp_path: Any) -> None:
    corpus = write_tiny_corpus(tmp_path / "corpus")
    found = run_on_ranks(2, reports_of_slowed_runs, corpus)[0]
    for layout, lines in found.items():
        assert len(lines) == 2, layout
        # The first step warms up, which takes both ranks longer than the sleep.
        times = re.search(r"longest rank (\d) \(process.*?, (\d\.\d\d) times the median", lines[1])
        assert times is not None, lines
        assert int(times[1]) == SLOW_RANK, (layout, lines)
        assert float(times[2]) > 1.3, (layout, lines)
