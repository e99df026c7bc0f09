"""The law of --compile: compiled layers compute what eager ones do, on every layout, to rounding.

In float64, so that what differs is the order of sums alone; with dropout, so that a mask of other
numbers would be seen. What is not wide runs graphs operation by operation: all is traced as for
inductor, whose code takes a minute to compile.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

from megatron.config.run import RunConfig
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP64,
    MODELS,
    Record,
    assert_all_close,
    assert_close,
    assert_went_on,
    tiny_run,
    train_all,
    whole,
    write_tiny_corpus,
)

DROPPING = {"hidden_dropout": 0.2, "eval_iters": 1, "eval_interval": 2, "compile": True}
TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
SPLIT: dict[str, Any] = {**TP, "sequence_parallel": True, "micro_batch_size": 2}
FULL: dict[str, Any] = {"recompute_granularity": "full"}
# Scales from the largest values of steps before, which go from a forward to its backward pass.
IN_FP8: dict[str, Any] = {
    "hidden_size": 64, "ffn_hidden_size": 96, "fp8_format": "hybrid", "fp8_recipe": "delayed",
}  # fmt: skip
# What a run adds to one on two ranks.
WIDE: dict[str, dict[str, Any]] = {
    "sequences split": {**MODELS["llama"], **SPLIT},
    "a bias after the sum over ranks": {**TP},
    "recomputed, split, on the host": {
        **TP, **FULL, "distribute_saved_activations": True, "cpu_offloading_num_layers": 1
    },
    "two virtual stages a rank": {
        **MODELS["llama"], "pipeline_model_parallel_size": 2, "num_layers": 4,
        "num_layers_per_virtual_pipeline_stage": 1,
    },
    "overlapped, shared out": {
        "use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True
    },
    "bloom": {**MODELS["bloom"], **SPLIT},
    "parts of sequences on a ring": {**SPLIT, "tp_comm_overlap": True},
    "neox": {**MODELS["neox, qwen, mistral"], **SPLIT},
    "ragged": {**MODELS["ragged"]},
    "in FP8, sequences split, recomputed": {**MODELS["llama"], **IN_FP8, **SPLIT, **FULL},
    "in FP8 by rows, first layer not": {
        **TP, **IN_FP8, "fp8_format": "e4m3", "fp8_recipe": "rowwise",
        "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 0,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


@pytest.fixture(scope="module", autouse=True)
def graphs(pytestconfig: pytest.Config) -> Iterator[None]:
    """Graphs are kept from one session to the next; the first one compiles them."""
    assert pytestconfig.cache is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(pytestconfig.cache.mkdir("graphs")))
        yield


def a_run(corpus: str, **flags: Any) -> RunConfig:
    return tiny_run(corpus, **(DROPPING | flags))


def check_equal(found: Sequence[Record], expected: Sequence[Record], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_close(one.losses, other.losses, tolerance)
        assert_close(one.grad_norms, other.grad_norms, tolerance)
        assert [e.mean for e in one.evaluations] != []
        assert_close(
            [e.mean for e in one.evaluations], [e.mean for e in other.evaluations], tolerance
        )
    assert_all_close(whole(found, prefix="model/"), whole(expected, prefix="model/"), tolerance)


def train_as_traced(
    configs: Sequence[RunConfig],
    train: Callable[[Sequence[RunConfig]], list[Record]] = train_all,
) -> list[Record]:
    """Do as `train` with torch's backend that runs a graph's operations one by one."""
    found = torch._dynamo.lookup_backend
    torch._dynamo.lookup_backend = lambda _: found("aot_eager")
    try:
        return train(configs)
    finally:
        torch._dynamo.lookup_backend = found


@pytest.mark.parametrize(
    "train", [train_as_traced, pytest.param(train_all, marks=pytest.mark.wide)]
)
@pytest.mark.parametrize("products", [{}, IN_FP8], ids=["", "in FP8"])
def test_compiled_layers_compute_the_same_and_go_on_with_the_same_bits(
    corpus: str,
    tmp_path: Path,
    products: dict[str, Any],
    train: Callable[[Sequence[RunConfig]], list[Record]],
) -> None:
    flags = MODELS["llama"] | products
    folder = str(tmp_path)
    configs = [
        a_run(corpus, **flags, compile=False),
        a_run(corpus, **flags, save=folder, save_interval=1),
        a_run(corpus, **flags, load=folder, load_iteration=1),
    ]
    ((eager, straight, resumed),) = run_on_ranks(1, train, configs, timeout_s=300)
    check_equal([straight], [eager], FP64)
    assert_went_on([resumed], [straight], last=2)


@pytest.mark.wide
@pytest.mark.parametrize("name", WIDE)
def test_every_layout_and_model_computes_the_same(corpus: str, name: str) -> None:
    configs = [a_run(corpus, **WIDE[name], compile=made) for made in (False, True)]
    by_rank = run_on_ranks(2, train_all, configs, timeout_s=300)
    eager, compiled = ([records[at] for records in by_rank] for at in range(2))
    check_equal(compiled, eager, FP64)
