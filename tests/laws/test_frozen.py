"""The layout law with frozen parameters, and with fewer trained parameters than ranks.

A frozen layer has no gradients, no place in any buffer and no state, and lies between layers that
have; a buffer of one parameter leaves most ranks of a sharded optimizer with padding. A pipeline
stage without a trained parameter is refused, so that case is not here.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.model.gpt_model import gpt_layers
from megatron.model.specs import LayerSpec, ModelBuild
from pretrain_gpt import gpt_task
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP64,
    MODELS,
    Record,
    assert_all_close,
    assert_close,
    tiny_run,
    train,
    whole,
    write_tiny_corpus,
)

ALL_BUT_ONE = ("embedding", "layers.0", "layers.1", "output")
FROZEN: Mapping[str, tuple[str, ...]] = {
    "the embedding and the last block": ("embedding", "layers.1"),
    "all but one norm": ALL_BUT_ONE,
}
FULLY_SHARDED = {"data_parallel_sharding_strategy": "optim_grads_params"}
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "dp 4": {},
    "dp 4, optimizer shared out": {"use_distributed_optimizer": True},
    "dp 4, all shared out": FULLY_SHARDED,
    "tp 2, dp 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp 2, dp 2": {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
}
RANKS, STEPS = 4, 2


def frozen(build: Any) -> nn.Module:
    """Build a layer that is not trained."""
    module: nn.Module = build()
    return module.requires_grad_(False)


def layers(names: tuple[str, ...], config: ModelConfig, build: ModelBuild) -> tuple[LayerSpec, ...]:
    """The layers of a GPT, of which those of `names` are frozen."""
    return tuple(
        replace(spec, build=partial(frozen, spec.build)) if spec.name in names else spec
        for spec in gpt_layers(config, build)
    )


def train_frozen(runs: list[tuple[tuple[str, ...], RunConfig]]) -> list[Record]:
    return [
        train(config, replace(gpt_task(), layers=partial(layers, names))) for names, config in runs
    ]


def run_of(corpus: str, **flags: Any) -> RunConfig:
    return tiny_run(
        corpus, **{**MODELS["llama"], "train_iters": STEPS, "weight_decay": 0.1, **flags}
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


@pytest.fixture(scope="module")
def alone(corpus: str) -> dict[str, Record]:
    """The run of one rank for each set of frozen layers; and of one step, of the last of them."""
    runs = [(names, run_of(corpus)) for names in FROZEN.values()]
    runs.append((ALL_BUT_ONE, run_of(corpus, train_iters=1)))
    ((records),) = run_on_ranks(1, train_frozen, runs)
    return dict(zip((*FROZEN, "one step"), records))


def test_every_layout_trains_the_same_and_leaves_the_same(
    corpus: str, alone: Mapping[str, Record]
) -> None:
    cases = [
        (names, layout)
        for names in FROZEN
        for layout in LAYOUTS
        if FROZEN[names] != ALL_BUT_ONE or not layout.startswith("pp")
    ]
    runs = [(FROZEN[names], run_of(corpus, **LAYOUTS[layout])) for names, layout in cases]
    by_rank = run_on_ranks(RANKS, train_frozen, runs, timeout_s=120)
    for (names, layout), records in zip(cases, zip(*by_rank)):
        expected = alone[names]
        assert_close(records[0].losses, expected.losses, FP64)
        assert_close(records[0].grad_norms, expected.grad_norms, FP64)
        found = whole(records)
        assert found.keys() == whole([expected]).keys(), f"{names}, {layout}"
        assert_all_close(found, whole([expected]), FP64)


def test_frozen_weights_do_not_change_and_have_no_state(alone: Mapping[str, Record]) -> None:
    before, after = whole([alone["one step"]]), whole([alone["all but one norm"]])
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert {name for name in changed if name.startswith("model/")} == {"model/final_norm.weight"}
    states = {name for name in after if not name.startswith("model/")}
    assert states
    assert all("final_norm.weight" in name for name in states)
