"""The layout law in FP8: the same roundings on every layout, in float64 around emulated products.

Rounding to 8 bits is not continuous, so the law holds only where scales are those of whole
matrices: a scale of a rank's own part differs from it by percents.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.config.run import RunConfig
from megatron.engine import amax_history
from megatron.mpu import layers
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

GATED = {**MODELS["llama"], "ffn_hidden_size": 96}
TENSORWISE = {"hidden_size": 64, "fp8_format": "hybrid"}
MODEL_OF: dict[str, dict[str, Any]] = {
    "tensorwise": {**GATED, **TENSORWISE},
    "delayed": {**GATED, **TENSORWISE, "fp8_recipe": "delayed", "train_iters": 3},
    "experts": {
        **MODELS["mixtral"],
        **TENSORWISE,
        "fp8_recipe": "delayed",
        "moe_ffn_hidden_size": 96,
        "moe_shared_expert_intermediate_size": 64,
        "train_iters": 3,
    },
    "rowwise": {**GATED, **TENSORWISE, "fp8_recipe": "rowwise", "fp8_format": "e4m3"},
    "mxfp8": {**TENSORWISE, "fp8_recipe": "mxfp8"},
    "blockwise": {**TENSORWISE, "fp8_recipe": "blockwise", "hidden_size": 256},
}
_WIDE = ("mxfp8", "blockwise", "experts")
TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": TP,
    "tp 2, sequences split, recomputed": {
        **TP,
        "sequence_parallel": True,
        "recompute_granularity": "full",
    },
    "pp 2, late gradients of weights": {
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": "zero-bubble",
    },
    "dp 2": {"use_distributed_optimizer": True},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def a_run(corpus: str, model: str, **flags: Any) -> RunConfig:
    # Micro-batches are equal everywhere: scales are those of the tokens of one of them.
    sizes = {"micro_batch_size": 2, "train_iters": 2, "eval_iters": 1, "eval_interval": 2}
    return tiny_run(corpus, **(sizes | MODEL_OF[model] | flags))


def check_equal(records: Sequence[Record], alone: Record) -> None:
    for record in records:
        assert_close(record.losses, alone.losses, FP64)
        assert_close(record.grad_norms, alone.grad_norms, FP64)
        assert_close(
            [e.mean for e in record.evaluations], [e.mean for e in alone.evaluations], FP64
        )
    for prefix in ("model/", "fp8/"):
        assert_all_close(whole(records, prefix=prefix), whole([alone], prefix=prefix), FP64)


@pytest.mark.parametrize(
    "model",
    [
        *[name for name in MODEL_OF if name not in _WIDE],
        *[pytest.param(name, marks=pytest.mark.wide) for name in _WIDE],
    ],
)
def test_every_layout_rounds_alike(corpus: str, model: str) -> None:
    without = {"fp8_format": None, "fp8_recipe": "tensorwise"}
    configs = [a_run(corpus, model), a_run(corpus, model, **without)]
    ((alone, exact),) = run_on_ranks(1, train_all, configs)
    apart = abs(alone.losses[1] - exact.losses[1])
    assert 1e-5 < apart / exact.losses[1] < 0.1, "FP8 is meant to be felt, and to train"
    by_rank = run_on_ranks(
        2, train_all, [a_run(corpus, model, **flags) for flags in LAYOUTS.values()]
    )
    for at, name in enumerate(LAYOUTS):
        try:
            check_equal([records[at] for records in by_rank], alone)
        except AssertionError as error:
            error.add_note(f"layout: {name}")
            raise


def train_with_own_scales(configs: Sequence[RunConfig]) -> list[Record]:
    """Train while no largest value is reduced over ranks."""
    layers.all_reduce = lambda tensor, **of: tensor  # type: ignore[assignment]
    return train_all(configs)


@pytest.mark.parametrize("model", ["tensorwise", "rowwise"])
def test_scales_of_parts_are_noticed(corpus: str, model: str) -> None:
    ((alone,),) = run_on_ranks(1, train_all, [a_run(corpus, model)])
    records = [
        found for (found,) in run_on_ranks(2, train_with_own_scales, [a_run(corpus, model, **TP)])
    ]
    assert abs(records[0].losses[0] - alone.losses[0]) > 1e4 * FP64 * alone.losses[0]


def train_with_own_histories(configs: Sequence[RunConfig]) -> list[Record]:
    """Train while every rank's histories are of what it has seen itself."""
    amax_history.all_reduce = lambda tensor, *of, **named: tensor  # type: ignore[assignment]
    return train_all(configs)


@pytest.mark.parametrize("layout", ["tp 2", pytest.param("dp 2", marks=pytest.mark.wide)])
def test_histories_of_parts_are_noticed(corpus: str, layout: str) -> None:
    ((alone,),) = run_on_ranks(1, train_all, [a_run(corpus, "delayed")])
    split = a_run(corpus, "delayed", **LAYOUTS[layout])
    records = [found for (found,) in run_on_ranks(2, train_with_own_histories, [split])]
    assert_close(records[0].losses[:1], alone.losses[:1], FP64)  # whose scales are its own
    assert abs(records[0].losses[2] - alone.losses[2]) > 1e4 * FP64 * alone.losses[2]


@pytest.mark.parametrize("model", ["delayed", pytest.param("tensorwise", marks=pytest.mark.wide)])
def test_a_run_goes_on_with_the_same_bits(corpus: str, model: str, tmp_path: Path) -> None:
    flags = {**TP, "bf16": True, "train_iters": 3, "first_last_layers_bf16": True, "num_layers": 3}
    save = {"save": str(tmp_path), "exit_interval": 1}
    straight = [run for (run,) in run_on_ranks(2, train_all, [a_run(corpus, model, **flags)])]
    run_on_ranks(2, train_all, [a_run(corpus, model, **flags, **save)])
    loading = a_run(corpus, model, **flags, load=str(tmp_path))
    resumed = [run for (run,) in run_on_ranks(2, train_all, [loading])]
    assert_went_on(resumed, straight, last=2)


@pytest.mark.wide
def test_histories_go_on_in_every_layout(corpus: str, tmp_path: Path) -> None:
    ((alone,),) = run_on_ranks(1, train_all, [a_run(corpus, "delayed")])
    split = LAYOUTS["pp 2, late gradients of weights"]
    saving = a_run(corpus, "delayed", **split, save=str(tmp_path), exit_interval=1)
    run_on_ranks(2, train_all, [saving])
    others = {name: flags for name, flags in LAYOUTS.items() if flags is not split}
    by_rank = run_on_ranks(
        2, train_all, [a_run(corpus, "delayed", **of, load=str(tmp_path)) for of in others.values()]
    )
    for at, name in enumerate(others):
        for records in by_rank:
            assert_close(records[at].losses, alone.losses[1:], FP64)
        found = whole([records[at] for records in by_rank], prefix="fp8/")
        assert found, name
        assert_all_close(found, whole([alone], prefix="fp8/"), FP64)
