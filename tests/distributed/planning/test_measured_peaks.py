"""The peak of a plan beside that of real ranks, for models of many kinds: within a tenth.

The tensors of the real step are followed as operations make and drop them. With `-s` a table is
printed; docs/planning.md has one.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from megatron.planning.rehearsal import RankPlan
from tests.distributed.planning.test_rehearsal import Seen, compare, plans_of_ends, real_steps
from tests.support.ranks import run_on_ranks

RANKS = 4
TOLERANCE = 0.1
BESIDE = 16384  # bytes beside gradients between steps: scalars, tables of positions, tokens

DENSE: dict[str, Any] = {
    **{"num_layers": 4, "hidden_size": 64, "seq_length": 64, "max_position_embeddings": 64},
    **{"micro_batch_size": 2, "global_batch_size": 16, "bf16": True},
}
LLAMA = {
    **{"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"},
    **{"num_query_groups": 2, "add_bias_linear": False},
    "untie_embeddings_and_output_weights": True,
}
TP = {"tensor_model_parallel_size": 2}
SP = TP | {"sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
EXPERTS = {"num_experts": 4, "moe_router_topk": 4, "add_bias_linear": False}
FULL = {"recompute_granularity": "full"}
FP32 = {"bf16": False, "fp64": False}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "dense, bf16": {},
    "dense, fp32": FP32,
    "SwiGLU, grouped queries": LLAMA,
    "SwiGLU, grouped queries, fp32, tp": LLAMA | FP32 | TP,
    "tp": TP,
    "tp, sequence parallel": SP,
    "tp, sequence parallel, distributed optimizer": SP | {"use_distributed_optimizer": True},
    "tp, pp, fp32": TP | PP | FP32,
    "pp, 1f1b": PP,
    "pp, interleaved": PP | {"num_virtual_stages_per_pipeline_rank": 2},
    "pp, zero-bubble": PP | {"pipeline_schedule": "zero-bubble"},
    "cp, a ring": {"context_parallel_size": 2},
    "cp, all-to-all, SwiGLU": LLAMA | {"context_parallel_size": 2, "cp_comm_type": "a2a"},
    "experts": EXPERTS,
    "experts, ep": EXPERTS | {"expert_model_parallel_size": 2},
    "distributed optimizer": {"use_distributed_optimizer": True},
    "gradients shared out": {"data_parallel_sharding_strategy": "optim_grads"},
    "fully sharded": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "fully sharded, SwiGLU, fp32": LLAMA
    | FP32
    | {"data_parallel_sharding_strategy": "optim_grads_params"},
    "recomputation, selective": {"recompute_granularity": "selective"},
    "recomputation, full uniform": FULL | {"recompute_method": "uniform"},
    "recomputation, full block": FULL | {"recompute_method": "block", "recompute_num_layers": 2},
    "scores of attention, logits at once": {
        "attention_backend": "unfused",
        "cross_entropy_loss_fusion": False,
    },
}


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Seen]]:
    layouts = [DENSE | flags for flags in CONFIGURATIONS.values()]
    by_rank = run_on_ranks(RANKS, real_steps, layouts, True, timeout_s=600)
    return {name: [ranks[at] for ranks in by_rank] for at, name in enumerate(CONFIGURATIONS)}


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_peaks_are_within_a_tenth_and_bytes_of_calls_are_exact(
    seen: dict[str, list[Seen]],
) -> None:
    assert len(CONFIGURATIONS) >= 16
    rows: list[tuple[str, RankPlan, Seen]] = []
    for name, real in seen.items():
        plans = plans_of_ends(DENSE | CONFIGURATIONS[name], RANKS)
        compare(plans, real, beside=BESIDE)
        rows += [(name, plan, real[plan.rank]) for plan in plans]
    print("\n" + "\n".join(table(rows)))
    wrong = [name for name, plan, real in rows if abs(_error(plan, real)) > TOLERANCE]
    assert not wrong


def table(rows: Sequence[tuple[str, RankPlan, Seen]]) -> Iterator[str]:
    """Yield a table in Markdown, with the rank of each configuration that is furthest off."""
    yield "| configuration | planned peak | measured peak | error | bytes sent |"
    yield "|---|---|---|---|---|"
    for name in CONFIGURATIONS:
        of_name = [(plan, real) for other, plan, real in rows if other == name]
        plan, real = max(of_name, key=lambda pair: abs(_error(*pair)))
        sent = sum(size for _, size in real.sent.values())
        yield (
            f"| {name} | {plan.bytes.peak:,} | {real.peak:,} | {_error(plan, real):+.1%} | "
            f"{sent:,} |"
        )


def _error(plan: RankPlan, real: Seen) -> float:
    assert real.peak is not None
    return plan.bytes.peak / real.peak - 1
