"""The law of layouts for Lion, Muon and the groups of muP: they equal one process.

Muon needs whole matrices, of which tensor-parallel ranks and those of experts have parts.
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

MUON: dict[str, Any] = {"optimizer": "muon", "muon_extra_scale_factor": 0.2, "weight_decay": 0.1}
LION: dict[str, Any] = {"optimizer": "lion", "lr": 0.003, "weight_decay": 0.1}
MUP: dict[str, Any] = {
    "use_mup": True,
    "mup_base_hidden_size": 4,
    "mup_base_head_dim": 2,
    "mup_embedding_mult": 1.5,
    "weight_decay": 0.1,
    "adam_eps": 1e-4,
}
# Signs of gradients that are 0 but for rounding are not the same on all layouts, so Lion trains
# models in which there are none: attention does not depend on the bias of keys.
RUNS: dict[str, dict[str, Any]] = {
    "muon, gpt2": {**MODELS["gpt2"], **MUON, "muon_nesterov": True, "decoupled_lr": 0.02},
    "muon, llama": {**MODELS["llama"], **MUON, "muon_scale_mode": "unit_rms_norm"},
    "muon and lion, mixtral": {
        **MODELS["mixtral"],
        **MUON,
        "muon_scalar_optimizer": "lion",
        "muon_coefficient_type": "simple",
        "muon_no_split_qkv": True,
    },
    "lion, llama": {**MODELS["llama"], **LION},
    "muP, gpt2": {**MODELS["gpt2"], **MUP},
    "muP with sgd, llama": {**MODELS["llama"], **MUP, "optimizer": "sgd", "decoupled_lr": 0.02},
    "lion, mixtral": {**MODELS["mixtral"], **LION},
}
SP: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SHARDED: dict[str, Any] = {"data_parallel_sharding_strategy": "optim_grads_params"}
EXPERTS: dict[str, Any] = {"expert_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": SP,
    "pp 2": {"pipeline_model_parallel_size": 2},
    "dp 2": {},
}
OVER_EXPERTS: dict[str, dict[str, Any]] = {
    "ep 2, dp 2": EXPERTS,
    "ep 2, etp 2": {**SP, **EXPERTS, "expert_tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


@pytest.fixture(scope="module")
def alone(corpus: str) -> dict[str, Record]:
    (records,) = run_on_ranks(1, train_all, [tiny_run(corpus, **run) for run in RUNS.values()])
    return dict(zip(RUNS, records))


def check(by_rank: list[list[Record]], references: list[Record]) -> None:
    for at, reference in enumerate(references):
        records = [of_rank[at] for of_rank in by_rank]
        assert_close(records[0].losses, reference.losses, FP64)
        assert_close(records[0].grad_norms, reference.grad_norms, FP64)
        assert_all_close(whole(records), whole([reference]), FP64)


def test_two_ranks_update_as_one_process(corpus: str, alone: dict[str, Record]) -> None:
    """All layouts of two ranks share a start; replicas share Lion's state out too.

    Every run is split over tp, the others take the stages and the replicas in turn.
    """
    others = (LAYOUTS["pp 2"], LAYOUTS["dp 2"])
    runs = [(name, LAYOUTS["tp 2"]) for name in RUNS]
    runs += [(name, others[at % 2]) for at, name in enumerate(RUNS)]
    runs += [(name, SHARDED) for name in RUNS if name.startswith("lion")]
    configs = [tiny_run(corpus, **{**RUNS[name], **layout}) for name, layout in runs]
    check(run_on_ranks(2, train_all, configs), [alone[name] for name, _ in runs])


def test_ranks_of_experts_update_as_one_process(corpus: str, alone: dict[str, Record]) -> None:
    names = [name for name in RUNS if name.endswith("mixtral")]
    runs = [(name, layout) for layout in OVER_EXPERTS.values() for name in names]
    configs = [tiny_run(corpus, **{**RUNS[name], **layout}) for name, layout in runs]
    check(run_on_ranks(4, train_all, configs), [alone[name] for name, _ in runs])


def test_the_layout_would_show_if_ranks_took_parts_for_whole_matrices(
    corpus: str, alone: dict[str, Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [tiny_run(corpus, **RUNS["muon, llama"], **SP)]
    ((record,), _) = run_on_ranks(2, blockwise, configs)
    assert abs(record.losses[-1] - alone["muon, llama"].losses[-1]) > 1e3 * FP64


def blockwise(configs: list[Any]) -> list[Record]:
    """Train in a rank whose optimizer takes its parts of matrices for whole ones."""
    from megatron.mpu.context import ParallelContext
    from megatron.optimizer import muon

    muon._split = lambda parameter, ctx: (ParallelContext.single().tp, None)
    return train_all(configs)
