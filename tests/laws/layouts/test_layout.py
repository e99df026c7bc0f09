"""The layout law: the same seed and data train the same model on every tensor x data grid.

Everything is the program's own: corpus, loaders, engine, loop. Float64 and no dropout, so that an
error cannot hide in rounding; the narrower precisions are held to their bands for one model.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.config.run import RunConfig
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    BF16,
    FP32,
    FP64,
    MODELS,
    Record,
    assert_all_close,
    assert_close,
    tiny_run,
    train_all,
    whole,
    write_tiny_corpus,
)

LAYOUTS = {2: (2, 1), 4: (4, 2, 1)}  # world size: tensor-parallel sizes
VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.1, "decoupled_lr": 0.03},
    "sgd, recompute": {"optimizer": "sgd", "lr": 0.05, "recompute_granularity": "full"},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def layout_run(corpus: str, flags: Mapping[str, Any], tp: int, world_size: int) -> RunConfig:
    """One process takes micro-batches of 1, all others two of whatever size that makes."""
    return tiny_run(
        corpus,
        **flags,
        tensor_model_parallel_size=tp,
        micro_batch_size=1 if world_size == 1 else 4 * tp // world_size,
    )


def check_equal(
    found: Iterable[Sequence[Record]],
    alone: Sequence[Record],
    tolerance: float,
    *,
    parameters: float,
) -> None:
    expected = whole(alone, prefix="model/")
    for records in found:
        for record in records:  # every rank has the same numbers
            assert (record.losses, record.grad_norms) == (records[0].losses, records[0].grad_norms)
        assert_close(records[0].losses, alone[0].losses, tolerance)
        assert_close(records[0].grad_norms, alone[0].grad_norms, tolerance)
        assert_all_close(whole(records, prefix="model/"), expected, parameters)
        assert_close(mean_losses(records), mean_losses(alone), tolerance)


def mean_losses(records: Sequence[Record]) -> list[float]:
    return [evaluation.mean for evaluation in records[0].evaluations]


# The matrix has every part of the first two, and of the third all but its norm of embeddings on
# the same grids.
WIDE = ("gpt2", "llama", "bloom")
TAKEN = [pytest.param(model, marks=[pytest.mark.wide] if model in WIDE else []) for model in MODELS]


@pytest.mark.parametrize("model", TAKEN)
def test_every_layout_trains_the_same_model(corpus: str, model: str) -> None:
    shape = {**MODELS[model], "eval_iters": 1, "eval_interval": 3}
    runs = [layout_run(corpus, shape | flags, 1, 1) for flags in VARIANTS.values()]
    (alone,) = run_on_ranks(1, train_all, runs)
    for record in alone:
        assert max(record.grad_norms) > 0.5, "clipping is meant to be active"
        assert len(set(record.losses)) == len(record.losses), "the weights are meant to move"
        assert record.plans[0].num_microbatches == 8
    # Layouts take the variants in turn, and models begin with one and the other: every layout
    # meets every variant.
    variants = itertools.cycle(range(len(VARIANTS)))
    if list(MODELS).index(model) % len(VARIANTS):
        next(variants)
    # On four ranks each model is without one of the three.
    number = list(MODELS).index(model)
    for world_size, every in LAYOUTS.items():
        sizes = [tp for at, tp in enumerate(every) if len(every) == 2 or at != number % 3]
        taken = [next(variants) for _ in sizes]
        configs = [
            layout_run(corpus, shape | list(VARIANTS.values())[variant], tp, world_size)
            for tp, variant in zip(sizes, taken)
        ]
        by_rank = run_on_ranks(world_size, train_all, configs)
        for variant, *records in zip(taken, *by_rank):
            assert records[0].plans[0].num_microbatches == 2
            check_equal([records], [alone[variant]], FP64, parameters=FP64)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", FP32), ("bf16", BF16)])
def test_narrower_precisions_stay_within_their_bands(
    corpus: str, precision: str, tolerance: float
) -> None:
    flags = {**MODELS["llama"], "fp64": False, "bf16": precision == "bf16", "eval_iters": 1}
    (alone,) = run_on_ranks(1, train_all, [layout_run(corpus, flags, 1, 1)])
    found = []
    for world_size, sizes in LAYOUTS.items():
        configs = [layout_run(corpus, flags, tp, world_size) for tp in sizes]
        found += zip(*run_on_ranks(world_size, train_all, configs))
    # AdamW turns a gradient that is nothing but rounding into a step of full length, so single
    # weights can be anywhere within the steps taken, each of the learning rate of 0.01.
    check_equal(found, alone, tolerance, parameters=0.5)
