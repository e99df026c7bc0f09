"""Recomputed, distributed or offloaded activations train the very same model, dropout included.

Everything is the program's own. No tolerance: losses, gradient norms, every tensor of the model and
of the optimizer and every generator are compared bit for bit with a run that keeps everything.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.tiny import MODELS, assert_same_bits, tiny_run, train_all, write_tiny_corpus

FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}
VARIANTS: dict[str, dict[str, Any]] = {
    "uniform": FULL,
    "uniform 2": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 2},
    "block 2": {**FULL, "recompute_method": "block", "recompute_num_layers": 2},
    "core_attn": SELECTIVE,
    "mlp": {**SELECTIVE, "recompute_modules": ("mlp",)},
    "act": {**SELECTIVE, "recompute_modules": ("act",)},
    "layernorm": {**SELECTIVE, "recompute_modules": ("layernorm",)},
    "all modules": {**SELECTIVE, "recompute_modules": ("core_attn", "mlp", "act", "layernorm")},
    "offload": {"cpu_offloading_num_layers": 2},
    "offload, all": {**FULL, "checkpoint_in_cpu": True},
    "offload, uniform": {**FULL, "cpu_offloading_num_layers": 3},
    "offload, mlp": {**SELECTIVE, "recompute_modules": ("mlp",), "cpu_offloading_num_layers": 3},
}
SPLIT: dict[str, dict[str, Any]] = {
    "distributed": {**FULL, "distribute_saved_activations": True},
    "distributed, uniform 2": {
        **FULL,
        "recompute_num_layers": 2,
        "distribute_saved_activations": True,
    },
    "distributed, offload": {
        **FULL,
        "distribute_saved_activations": True,
        "cpu_offloading_num_layers": 2,
    },
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"fp64": False},
    "bf16": {"fp64": False, "bf16": True},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


@pytest.mark.parametrize(
    ("precision", "tp", "model"),
    [
        pytest.param("fp32", 1, "gpt2", marks=pytest.mark.wide),
        pytest.param("bf16", 1, "ragged", marks=pytest.mark.wide),
        ("bf16", 1, "llama"),
        ("fp32", 2, "ragged"),
        pytest.param("bf16", 2, "gpt2", marks=pytest.mark.wide),
        pytest.param("bf16", 2, "llama", marks=pytest.mark.wide),
    ],
)
def test_no_bit_changes_with_dropout_on(corpus: str, precision: str, tp: int, model: str) -> None:
    base: dict[str, Any] = {
        **MODELS[model],
        **PRECISIONS[precision],
        "num_layers": 3,
        "hidden_dropout": 0.2,
        "attention_dropout": 0.1,
        "train_iters": 2,
        "micro_batch_size": 4,
        "tensor_model_parallel_size": tp,
    }
    variants = [{}, *VARIANTS.values(), *(SPLIT.values() if tp > 1 else ())]
    configs = [tiny_run(corpus, **base, **variant) for variant in variants]
    for records in run_on_ranks(tp, train_all, configs, timeout_s=180):
        plain, *others = records
        assert len(set(plain.losses)) == 2, "the weights are meant to move"
        assert len(others) == len(variants) - 1
        for found in others:
            assert_same_bits(found, plain)


LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline_model_parallel_size": 2},
    "interleaved": {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
    },
    "zero-bubble": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero-bubble"},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}


# The matrix has the other schedules beside every way to recompute.
TAKEN = ("zero-bubble", "sequence")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, marks=[] if one in TAKEN else [pytest.mark.wide]) for one in LAYOUTS],
)
def test_no_bit_changes_where_passes_are_in_flight_or_sequences_split(
    corpus: str, layout: str
) -> None:
    base: dict[str, Any] = {
        **MODELS["ragged"],
        **LAYOUTS[layout],
        "fp64": False,
        "num_layers": 5,
        "hidden_dropout": 0.2,
        "attention_dropout": 0.1,
        "train_iters": 2,
        "micro_batch_size": 2,
    }
    names = ("uniform 2", "block 2", "all modules", "offload, uniform")
    variants = [{}, *(VARIANTS[name] for name in names)]
    configs = [tiny_run(corpus, **base, **variant) for variant in variants]
    for plain, *others in run_on_ranks(2, train_all, configs, timeout_s=180):
        assert len(others) == len(names)
        for found in others:
            assert_same_bits(found, plain)
