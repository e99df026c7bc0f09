"""--check-collectives looks and changes nothing: a run with it is bit for bit the run without."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.config.run import RunConfig
from megatron.engine.base import PendingReport
from megatron.engine.native import NativeEngine
from megatron.errors import CollectiveError
from megatron.mpu.collectives import all_reduce
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run, train, train_all, write_tiny_corpus

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2, "recompute_granularity": "full"},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "context": {"context_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "distributed optimizer": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


# Each kind of call: of tensors that are split, of stages, of replicas.
TAKEN = ("sequence", "pipeline", "distributed optimizer")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, marks=[] if one in TAKEN else [pytest.mark.wide]) for one in LAYOUTS],
)
def test_a_run_with_checks_is_the_run_without(corpus: str, layout: str, tmp_path: Path) -> None:
    flags = {**LAYOUTS[layout], "hidden_dropout": 0.1, "eval_iters": 1, "save_interval": 2}
    flags["micro_batch_size"] = 2
    lengths = {"plain": 3, "checked": 3, "resumed": 4}
    configs = [
        tiny_run(
            corpus,
            **flags,
            check_collectives=name != "plain",
            save=str(tmp_path / name),
            load=str(tmp_path / "checked") if name == "resumed" else None,
            train_iters=iterations,
        )
        for name, iterations in lengths.items()
    ]
    for plain, *checked, resumed in run_on_ranks(2, train_all, configs, timeout_s=120):
        assert resumed.progress.iteration == 4
        for found in checked:
            assert (found.losses, found.grad_norms) == (plain.losses, plain.grad_norms)
            assert found.evaluations == plain.evaluations
            for name, part in plain.state.items():
                others = found.state[name].pieces
                for (_, values), (_, again) in zip(part.pieces, others, strict=True):
                    assert torch.equal(values, again), name


def train_with_one_call_too_many(config: RunConfig) -> str:
    """Return each rank's error when rank 1 makes one more call in the second step."""
    real = NativeEngine.start_step

    def wrong(self: NativeEngine, *given: Any) -> PendingReport:
        if dist.get_rank() == 1 and self.optimizer.scalars()["steps"] == 1:
            all_reduce(torch.ones(17), self._context.dp)
        return real(self, *given)

    NativeEngine.start_step = wrong  # type: ignore[method-assign]  # the process ends with the test
    try:
        train(config)
    except CollectiveError as error:
        return str(error)
    return "nothing"


def test_a_call_too_many_in_a_run_is_named_on_every_rank(corpus: str) -> None:
    texts = run_on_ranks(2, train_with_one_call_too_many, tiny_run(corpus, check_collectives=True))
    for text in texts:
        assert text.startswith("ranks that communicate do not do the same")
        assert "rank 1: all_reduce(sum) of [17] float32 at " in text
        assert "test_check_collectives.py" in text
        assert "rank 0: all_reduce(sum) of [" in text
        assert "megatron/optimizer/" in text
