"""The resume law: train 2N == train N, save, load in new processes, train N; every bit.

Losses, norms, loss scales, weights, optimizer, generators, the samples that were read and those of
validation, with dropout on, in the middle of an epoch, a batch-size ramp and a warm-up.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.experts import LoadBalancing, RouterScoreFunction
from megatron.config.run import RunConfig
from tests.support.ranks import run_on_ranks
from tests.support.tiny import MODELS, Record, tiny_run, train_all, write_tiny_corpus

HALF, FULL = 4, 7
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
# A ramp over 4, 6 and 8 samples: 3 iterations, 2 and 2. The border lies inside of it.
RAMP = {"rampup_batch_size": (4, 2, 24), "train_samples": 3 * 4 + 2 * 6 + 2 * 8}
EVALUATING = {"eval_iters": 1, "eval_interval": 3}
RUNS: dict[str, dict[str, Any]] = {
    "fp32, in order, ramp": {**DROPOUT, **RAMP, "fp64": False, "lr_warmup_samples": 25},
    "bf16, cyclic, worker processes": {
        **MODELS["llama"],
        **DROPOUT,
        "bf16": True,
        "dataloader_type": "cyclic",
        "num_workers": 2,
        "train_iters": FULL,
        "lr_decay_style": "cosine",
    },
    "fp16, worker processes, sgd, recompute": {
        **MODELS["ragged"],
        **DROPOUT,
        "fp16": True,
        # It overflows at first: skipped iterations and a moving scale are part of the run.
        "initial_loss_scale": 2.0**20,
        "loss_scale_window": 2,
        "hysteresis": 1,
        "optimizer": "sgd",
        "num_workers": 2,
        "recompute_granularity": "full",
        "train_iters": FULL,
    },
    "bf16, experts with losses of their own": {
        **MODELS["mixtral"],
        **DROPOUT,
        "bf16": True,
        "moe_router_load_balancing_type": LoadBalancing.SEQ_AUX_LOSS,
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.01,
        "train_iters": FULL,
    },
    "fp32, cyclic, alibi": {
        **MODELS["bloom"],
        **DROPOUT,
        **RAMP,
        "fp64": False,
        "dataloader_type": "cyclic",
        "recompute_granularity": "full",
        "weight_decay_incr_style": "linear",
        "start_weight_decay": 0.0,
        "end_weight_decay": 0.1,
    },
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


ON_ONE, *ON_TWO = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]  # tp, pp, dp
# One process resumes every run. Two ranks resume a third of them, in turn, the others are wide.
CASES = [
    pytest.param(*ON_ONE, list(RUNS), id="1-1-1"),
    *(
        pytest.param(
            *grid,
            [name for number, name in enumerate(RUNS) if (number % 3 == at) != others],
            id="-".join(map(str, grid)) + (", others" if others else ""),
            marks=[pytest.mark.wide] if others else [],
        )
        for at, grid in enumerate(ON_TWO)
        for others in (False, True)
    ),
]


@pytest.mark.parametrize(("tp", "pp", "dp", "names"), CASES)
def test_a_resumed_run_is_the_uninterrupted_run(
    corpus: str, tmp_path: Path, tp: int, pp: int, dp: int, names: list[str]
) -> None:
    plain = [
        tiny_run(
            corpus,
            **flags,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            micro_batch_size=(2 if "rampup_batch_size" in flags else 4) // dp,
            **EVALUATING,
        )
        for flags in map(RUNS.__getitem__, names)
    ]
    straight = check_resumed(dict(zip(names, plain)), tp * pp * dp, tmp_path)
    if tp == pp == dp == 1:
        check_what_the_runs_are_meant_to_be(*straight)


# What two ranks share beside replicas, stages and matrices.
SHARED: dict[str, dict[str, Any]] = {
    "sequences": {**MODELS["llama"], "hidden_dropout": 0.1, "context_parallel_size": 2},
    "experts, which drop tokens and are balanced by biases": {
        **MODELS["mixtral"],
        "add_bias_linear": True,
        "moe_router_score_function": RouterScoreFunction.SIGMOID,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
        "moe_expert_capacity_factor": 1.0,
        "expert_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
    },
    "the matrices of experts, by Muon": {
        **MODELS["mixtral"],
        "expert_tensor_parallel_size": 2,
        "optimizer": "muon",
    },
    "parameters": {**DROPOUT, "data_parallel_sharding_strategy": "optim_grads_params"},
}


def test_a_resumed_run_of_ranks_that_share_more_is_the_uninterrupted_run(
    corpus: str, tmp_path: Path
) -> None:
    flags = {"bf16": True, "train_iters": FULL, **EVALUATING}
    plain = {
        name: tiny_run(corpus, **flags, **shared, micro_batch_size=4 if name == "sequences" else 2)
        for name, shared in SHARED.items()
    }
    check_resumed(plain, 2, tmp_path)


def check_resumed(
    plain: Mapping[str, RunConfig],
    ranks: int,
    folder: Path,
    trains: Callable[[list[RunConfig]], list[Record]] = train_all,
    *,
    deepspeed: bool = False,
) -> list[Record]:
    """Train, and train in two halves; return the records of the first rank of those at once."""
    start: dict[str, Any] = {"timeout_s": 120, "deepspeed": deepspeed}
    saving = [
        _with_checkpoints(config, folder / str(at), exit_interval=HALF)
        for at, config in enumerate(plain.values())
    ]
    loading = [
        _with_checkpoints(config, folder / str(at)) for at, config in enumerate(plain.values())
    ]
    before = run_on_ranks(ranks, trains, [*plain.values(), *saving], **start)
    after = run_on_ranks(ranks, trains, loading, **start)
    for rank in range(ranks):
        straight, first = before[rank][: len(plain)], before[rank][len(plain) :]
        for name, *records in zip(plain, straight, first, after[rank]):
            check_joined(*records, where=f"{name}, rank {rank}")
    return before[0][: len(plain)]


def test_a_resumed_run_evaluates_named_groups_as_the_uninterrupted_run(
    corpus: str, tmp_path: Path
) -> None:
    """Groups of different sizes: in order, each starts over at another place of its own."""
    plain = [
        tiny_run(
            corpus,
            data_path=None,
            train_weighted_split_paths=(f"T: 3 0:0.4 {corpus}, 1 0.4:0.7 {corpus}",),
            valid_weighted_split_paths=(
                f"V: 1 0.7:0.78 {corpus}",
                f"W: 1 0.78:0.9 {corpus}, 2 0.7:0.9 {corpus}",
            ),
            test_weighted_split_paths=(f"X: 1 0.9:1 {corpus}",),
            dataloader_type=order,
            train_iters=FULL,
            micro_batch_size=4,
            **EVALUATING,
            **DROPOUT,
        )
        for order in ("single", "cyclic")
    ]
    saving = [
        _with_checkpoints(config, tmp_path / str(at), exit_interval=HALF)
        for at, config in enumerate(plain)
    ]
    loading = [_with_checkpoints(config, tmp_path / str(at)) for at, config in enumerate(plain)]
    before = run_on_ranks(1, train_all, [*plain, *saving], timeout_s=120)[0]
    after = run_on_ranks(1, train_all, loading, timeout_s=120)[0]
    for straight, first, second in zip(before[:2], before[2:], after):
        # Both groups after 3, 6 and 7 iterations, and the test.
        check_joined(straight, first, second, where="groups", evaluations=7)
        losses = [evaluation.mean for evaluation in straight.evaluations]
        assert len(set(losses)) == 7


def check_joined(
    straight: Record,
    first: Record,
    second: Record,
    where: str,
    *,
    steps: tuple[int, int] = (HALF, FULL),
    evaluations: int = 4,
) -> None:
    assert (len(first.steps), len(straight.steps)) == steps, where
    assert second.progress == straight.progress, where
    for name in ("steps", "plans", "evaluations", "trained_on", "evaluated_on"):
        joined, expected = getattr(first, name) + getattr(second, name), getattr(straight, name)
        # As text, in which any two floats differ and an overflow's nan equals itself.
        differing = [
            at for at, (one, two) in enumerate(zip(joined, expected)) if repr(one) != repr(two)
        ]
        assert not differing, f"{where}: {name} {differing}"
        assert len(joined) == len(expected), f"{where}: {name}"
    # After 3, 6 and 7 iterations, and the test.
    assert len(straight.evaluations) == evaluations, where
    assert straight.progress.consumed_valid_samples == 3 * 8, where
    assert second.scalars == straight.scalars, where
    assert second.state.keys() == straight.state.keys(), where
    for name, part in straight.state.items():
        other = second.state[name]
        for (box, one), (other_box, two) in zip(part.pieces, other.pieces, strict=True):
            assert (box, one.dtype) == (other_box, two.dtype), f"{where}: {name}"
            assert torch.equal(one, two), f"{where}: {name}"
    assert second.generators.keys() == straight.generators.keys(), where
    for name, state in straight.generators.items():
        found = second.generators[name]
        same = torch.equal(state, found) if isinstance(state, torch.Tensor) else state == found
        assert same, f"{where}: generator {name}"


def _with_checkpoints(config: RunConfig, folder: Path, **training: Any) -> RunConfig:
    checkpoint = dataclasses.replace(config.checkpoint, save=str(folder), load=str(folder))
    changed = dataclasses.replace(config.training, **training)
    return dataclasses.replace(config, checkpoint=checkpoint, training=changed)


def check_what_the_runs_are_meant_to_be(
    ramp: Record, bf16: Record, fp16: Record, experts: Record, alibi: Record
) -> None:
    """The ramp climbs, fp16 overflows: else the law would be easier to keep."""
    sizes = [plan.global_batch_size for plan in ramp.plans]
    assert sizes == [plan.global_batch_size for plan in alibi.plans] == [4] * 3 + [6] * 2 + [8] * 2
    assert len({plan.learning_rate for plan in ramp.plans}) == FULL
    assert 0 < fp16.progress.skipped_iterations < HALF
    assert len({step.loss_scale for step in fp16.steps}) > 2
    assert all(step.loss > 0 for step in bf16.steps)
    assert len({step.load_balancing_loss for step in experts.steps}) == FULL
    rows = [row for batch in bf16.trained_on for row in batch]
    assert len({tuple(row) for row in rows}) == len(rows), "no sample is read twice in an epoch"


def test_dropout_draws_in_the_runs_above(corpus: str) -> None:
    drawing = {**RUNS["fp32, in order, ramp"], "micro_batch_size": 2, "exit_interval": 1}
    still = {**drawing, **dict.fromkeys(DROPOUT, 0.0)}
    runs = [tiny_run(corpus, **flags) for flags in (drawing, still)]
    ((one, other),) = run_on_ranks(1, train_all, runs)
    assert one.losses != other.losses
