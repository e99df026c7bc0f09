"""Two runs of --deterministic-mode in processes of their own have the same bits.

Losses, gradient norms, and every tensor of the model and of the optimizer, with dropout.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.tiny import MODELS, assert_same_bits, tiny_run, train_all, write_tiny_corpus

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2, "deterministic_mode": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2, bf16": {"tensor_model_parallel_size": 2, "fp64": False, "bf16": True},
    "dp 2, distributed optimizer": {"use_distributed_optimizer": True, "fp64": False},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_runs_have_the_same_bits(corpus: str, name: str) -> None:
    config = tiny_run(corpus, **MODELS["llama"], **DROPOUT, **LAYOUTS[name])
    first, second = (run_on_ranks(2, train_all, [config]) for _ in range(2))
    for (found,), (expected,) in zip(first, second, strict=True):
        assert_same_bits(found, expected)
    other = tiny_run(corpus, **MODELS["llama"], **DROPOUT, **LAYOUTS[name], seed=7)
    ((reseeded,), _) = run_on_ranks(2, train_all, [other])
    assert reseeded.losses != first[0][0].losses
