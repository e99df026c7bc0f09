"""The layout law: the same seed and data train the same model on every tensor x data grid.

Everything is the program's own: corpus, loaders, engine, loop. Float64 and no dropout, so that an
error cannot hide in rounding; the narrower precisions are held to their bands for one model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

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

LAYOUTS = {1: (1,), 2: (2, 1), 4: (4, 2, 1)}  # world size: tensor-parallel sizes
VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.1},
    "sgd, recompute": {"optimizer": "sgd", "lr": 0.05, "recompute_granularity": "full"},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def at_all_layouts(corpus: str, flags: dict[str, Any]) -> dict[tuple[int, int], list[Record]]:
    """(tensor-parallel size, world size) to the records of every rank.

    One process takes micro-batches of 1, all others two micro-batches of whatever size that makes.
    """
    found = {}
    for world_size, sizes in LAYOUTS.items():
        configs = [
            tiny_run(
                corpus,
                **flags,
                tensor_model_parallel_size=size,
                micro_batch_size=1 if world_size == 1 else 4 * size // world_size,
            )
            for size in sizes
        ]
        by_rank = run_on_ranks(world_size, train_all, configs)
        for at, size in enumerate(sizes):
            found[size, world_size] = [records[at] for records in by_rank]
    return found


def check_equal(
    found: dict[tuple[int, int], list[Record]], tolerance: float, *, parameters: float
) -> None:
    alone = found[1, 1]
    expected = whole(alone, prefix="model/")
    for records in found.values():
        for record in records:  # every rank is told the same numbers
            assert (record.losses, record.grad_norms) == (records[0].losses, records[0].grad_norms)
        assert_close(records[0].losses, alone[0].losses, tolerance)
        assert_close(records[0].grad_norms, alone[0].grad_norms, tolerance)
        assert_all_close(whole(records, prefix="model/"), expected, parameters)
        assert_close(mean_losses(records), mean_losses(alone), tolerance)


def mean_losses(records: Sequence[Record]) -> list[float]:
    return [evaluation.mean for evaluation in records[0].evaluations]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_trains_the_same_model(corpus: str, model: str, variant: str) -> None:
    flags = {**MODELS[model], **VARIANTS[variant], "eval_iters": 1, "eval_interval": 3}
    found = at_all_layouts(corpus, flags)
    alone = found[1, 1][0]
    assert max(alone.grad_norms) > 0.5, "clipping is meant to be active"
    assert len(set(alone.losses)) == len(alone.losses), "the weights are meant to move"
    assert {records[0].plans[0].num_microbatches for records in found.values()} == {8, 2}
    check_equal(found, FP64, parameters=FP64)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", FP32), ("bf16", BF16)])
def test_narrower_precisions_stay_within_their_bands(
    corpus: str, precision: str, tolerance: float
) -> None:
    flags = {"fp64": False, "bf16": precision == "bf16", "eval_iters": 1}
    found = at_all_layouts(corpus, {**MODELS["llama"], **flags})
    # AdamW turns a gradient that is nothing but rounding into a step of full length, so single
    # weights can be anywhere within the steps taken: 5 times the learning rate of 0.01.
    check_equal(found, tolerance, parameters=0.5)
