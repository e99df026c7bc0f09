"""The reshard law: save at one layout, load at another, and the next losses are the next losses.

The second loss after the load depends on the optimizer's state, so that travels too.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
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

SAVED_AT, ALL = 2, 4
# World size: tensor- and pipeline-parallel sizes.
WITHOUT_STAGES = {1: [(1, 1)], 2: [(2, 1), (1, 1)], 4: [(4, 1), (2, 1), (1, 1)]}
WITH_STAGES = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 4: [(2, 2), (1, 2), (1, 4)]}
# tp, pp, dp of the run that saves, and where its checkpoint is loaded.
SAVED = [
    ((1, 1, 1), WITHOUT_STAGES),
    ((2, 1, 1), WITH_STAGES),
    ((2, 1, 2), WITHOUT_STAGES),
    ((1, 2, 1), WITH_STAGES),
    ((1, 4, 1), {1: [(1, 1)], 4: [(2, 2), (1, 4)]}),
]
RUNS: dict[str, dict[str, Any]] = {
    "llama, adamw": {**MODELS["llama"], "num_layers": 4},
    "gpt2, sgd": {"optimizer": "sgd", "num_layers": 4},
}


@pytest.mark.parametrize(("grid", "layouts"), SAVED)
def test_a_checkpoint_goes_on_at_any_layout(
    tmp_path: Path,
    grid: tuple[int, int, int],
    layouts: dict[int, list[tuple[int, int]]],
) -> None:
    tp, pp, dp = grid
    corpus = write_tiny_corpus(tmp_path / "corpus")
    plain = [tiny_run(corpus, **flags, train_iters=ALL) for flags in RUNS.values()]
    straight = run_on_ranks(1, train_all, plain)[0]
    saving = [
        tiny_run(
            corpus,
            **flags,
            train_iters=ALL,
            exit_interval=SAVED_AT,
            micro_batch_size=2,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            save=str(tmp_path / str(at)),
        )
        for at, flags in enumerate(RUNS.values())
    ]
    run_on_ranks(tp * pp * dp, train_all, saving)
    for world_size, sizes in layouts.items():
        cases = [(at, *size) for at in range(len(RUNS)) for size in sizes]
        loading = [
            tiny_run(
                corpus,
                **list(RUNS.values())[at],
                train_iters=ALL,
                micro_batch_size=2,
                tensor_model_parallel_size=loading_tp,
                pipeline_model_parallel_size=loading_pp,
                load=str(tmp_path / str(at)),
            )
            for at, loading_tp, loading_pp in cases
        ]
        by_rank = run_on_ranks(world_size, train_all, loading)
        for which, (at, *_) in enumerate(cases):
            check_continued([records[which] for records in by_rank], straight[at])


def check_continued(found: list[Record], straight: Record) -> None:
    assert found[0].progress == straight.progress
    assert_close(found[0].losses, straight.losses[SAVED_AT:], FP64)
    assert_close(found[0].grad_norms, straight.grad_norms[SAVED_AT:], FP64)
    # Weights and optimizer; moments are far smaller than the weights, and compared to their size.
    assert_all_close(whole(found), whole([straight]), FP64)
