"""A plan says exactly what real ranks send and keep, counted below our own collectives."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from megatron.engine.native import NativeEngine
from megatron.mpu import collectives
from megatron.mpu.context import ParallelContext
from megatron.planning.calls import Phases
from megatron.planning.rehearsal import RankPlan, World, engine_of, rehearse, run_step
from tests.support.live_bytes import PeakBytes
from tests.support.ranks import run_on_ranks
from tests.unit.planning.worlds import OF_TASK, planned_world

RANKS = 4
STEP = {"global_batch_size": 8, "bf16": True}
PIPELINE = STEP | {"pipeline_model_parallel_size": 2, "num_layers": 4, "global_batch_size": 16}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp, sequence parallel, distributed optimizer": STEP
    | {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
    },
    "tp, parts of sequences on a ring": STEP
    | {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True},
    "tp, fp32, overlapped all-reduce": {
        **{"global_batch_size": 8, "fp64": False, "tensor_model_parallel_size": 2},
        **{"overlap_grad_reduce": True, "ddp_bucket_size": 1000},
    },
    "1f1b": PIPELINE,
    "interleaved, distributed optimizer, overlapped": PIPELINE
    | {
        "num_virtual_stages_per_pipeline_rank": 2,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "interleaved, batch not in whole groups": PIPELINE
    | {"num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 18},
    "gpipe, weights of its own at the end": PIPELINE
    | {"pipeline_schedule": "gpipe", "untie_embeddings_and_output_weights": True},
    "zero-bubble": PIPELINE | {"pipeline_schedule": "zero-bubble"},
    "cp, a ring": STEP | {"context_parallel_size": 2},
    "cp, all-to-all": STEP | {"context_parallel_size": 2, "cp_comm_type": "a2a"},
    "cp, gathered": STEP | {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    # Every token takes every expert, so that they are as busy as a plan takes them to be.
    "experts shared out": STEP
    | {
        **{"num_experts": 4, "moe_router_topk": 4, "add_bias_linear": False},
        **{"expert_model_parallel_size": 2, "use_distributed_optimizer": True},
    },
    "experts shared out, sequence parallel": STEP
    | {
        **{"num_experts": 4, "moe_router_topk": 4, "add_bias_linear": False},
        **{"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2},
        "sequence_parallel": True,
    },
    "fully sharded": STEP
    | {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "num_distributed_optimizer_instances": 2,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "recomputation": STEP
    | {
        **{"recompute_granularity": "full", "recompute_method": "uniform"},
        "tensor_model_parallel_size": 2,
    },
}
# Models whose stages hand over other tensors than a GPT's, or other ones from stage to stage.
MODELS: dict[str, dict[str, Any]] = {
    "T5, the decoder begins with the third of four stages": PIPELINE
    | OF_TASK["t5"]
    | {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_split_rank": 2},
    "T5, interleaved, relative positions": PIPELINE
    | OF_TASK["t5"]
    | {"num_virtual_stages_per_pipeline_rank": 2, "position_embedding_type": "relative"},
    "retriever, interleaved": PIPELINE
    | OF_TASK["ict"]
    | {"num_virtual_stages_per_pipeline_rank": 2},
    "retriever of one tower, tp": STEP
    | OF_TASK["ict"]
    | {"tensor_model_parallel_size": 2, "biencoder_shared_query_context_model": True},
    "ViT, four stages": PIPELINE | OF_TASK["vit"] | {"pipeline_model_parallel_size": 4},
    "prefix LM, tp": STEP | OF_TASK["prefix-lm"] | {"tensor_model_parallel_size": 2},
}
WIDE: dict[str, dict[str, Any]] = {
    "tp x pp x dp, of eight ranks": PIPELINE
    | {
        **{"tensor_model_parallel_size": 2, "sequence_parallel": True},
        **{"use_distributed_optimizer": True, "num_virtual_stages_per_pipeline_rank": 2},
    },
    "cp x pp x dp, of eight ranks": PIPELINE | {"context_parallel_size": 2},
}

BESIDE = 2048  # bytes of rows, masks and labels of the last micro-batch

Sent = dict[tuple[str, tuple[int, ...]], tuple[int, int]]  # by operation and ranks: calls, bytes


class Seen(NamedTuple):
    """What a real rank sent in its second step, and what it holds after it."""

    sent: Sent
    peak: int | None  # where the tensors of the step were followed
    weights: int
    gradients: int
    optimizer: int


def world_of(flags: dict[str, Any], size: int) -> World:
    return planned_world(size, **flags)


def real_steps(layouts: Sequence[dict[str, Any]], follows: bool = False) -> list[Seen]:
    """Each layout's second step, on this rank of a gloo group.

    Args:
        follows: follow all tensors of the step, which takes twice as long.
    """
    return [_real_step(world_of(flags, dist.get_world_size()), follows) for flags in layouts]


def _real_step(world: World, follows: bool) -> Seen:
    live = PeakBytes()
    with live if follows else nullcontext():
        engine = engine_of(world, ParallelContext.build(world.topology), Phases())
        run_step(engine, world, 1)
        live.peak = 0
        with counted() as sent:
            run_step(engine, world, world.microbatches)
    return Seen(sent(), live.peak if follows else None, *_kept_bytes(engine))


def _kept_bytes(engine: NativeEngine) -> tuple[int, int, int]:
    """Weights, gradients and optimizer, from where the parts themselves have them."""
    flats = engine._replica.gradients.flats
    sharded = engine._weights
    weights = [
        parameter if sharded is None else sharded.values(parameter)
        for parameter in engine.stage.parameters()
    ]
    return (
        _size(weights),
        _size(flat.data for flat in flats),
        _size(engine.optimizer.kept()),
    )


def _size(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage() for tensor in tensors}
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@contextmanager
def counted() -> Iterator[Callable[[], Sent]]:
    """Count what is handed to torch.distributed itself."""
    calls: Counter[tuple[str, tuple[int, ...]]] = Counter()
    sizes: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def add(operation: str, ranks: Sequence[int], tensor: Tensor) -> None:
        key = operation, tuple(ranks)
        calls[key] += 1
        sizes[key] += tensor.numel() * tensor.element_size()

    def around(function: Any, operation: str, given: int) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            add(operation, dist.get_process_group_ranks(named["group"]), args[given])
            return function(*args, **named)

        return call

    def batch(operations: Any) -> Any:
        for one in operations:
            if one.op is dist.isend:
                add("send", (dist.get_rank(), one.peer), one.tensor)
        return posted(operations)

    posted = dist.batch_isend_irecv
    with ExitStack() as patches:
        for owner, name, operation, given in (
            (dist, "all_reduce", "all_reduce", 0),
            (dist, "all_to_all_single", "all_to_all", 1),
            (dist, "broadcast", "broadcast", 0),
            (collectives, "_ALL_GATHER", "all_gather", 1),
            (collectives, "_REDUCE_SCATTER", "reduce_scatter", 1),
        ):
            wrapped = around(getattr(owner, name), operation, given)
            patches.enter_context(patch.object(owner, name, wrapped))
        patches.enter_context(patch.object(dist, "batch_isend_irecv", batch))
        yield lambda: {key: (calls[key], sizes[key]) for key in calls}


def planned(rank: RankPlan) -> Sent:
    """The plan's calls, without what torch.distributed cannot know."""
    found: Sent = {}
    for kind, one in rank.calls.items():
        key = kind.operation.removesuffix("_rows"), kind.ranks
        calls, size = found.get(key, (0, 0))
        found[key] = calls + one.calls, size + one.bytes
    return found


def plans_of_ends(flags: dict[str, Any], size: int) -> tuple[RankPlan, ...]:
    """Plans of the first and the last rank of every axis."""
    return rehearse(world_of(flags, size), (0, size - 1))


def compare(plans: Sequence[RankPlan], seen: Sequence[Seen], *, beside: int = 256) -> None:
    """Compare plans with real ranks, exactly but for bytes kept `beside` gradients."""
    for plan in plans:
        real = seen[plan.rank]
        assert planned(plan) == real.sent
        assert plan.bytes.weights == real.weights
        assert plan.bytes.optimizer == real.optimizer
        # With the loss scale, a number of updates and the like.
        assert 0 <= plan.bytes.gradients - real.gradients < beside


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Seen]]:
    every = LAYOUTS | MODELS
    by_rank = run_on_ranks(RANKS, real_steps, list(every.values()))
    return {name: [of_rank[at] for of_rank in by_rank] for at, name in enumerate(every)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plan_is_what_ranks_send_and_keep(seen: dict[str, list[Seen]], name: str) -> None:
    compare(plans_of_ends(LAYOUTS[name], RANKS), seen[name])


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_of_another_model_is_what_ranks_send_and_keep(
    seen: dict[str, list[Seen]], name: str
) -> None:
    compare(plans_of_ends(MODELS[name], RANKS), seen[name], beside=BESIDE)


@pytest.mark.wide
@pytest.mark.parametrize("name", WIDE)
def test_a_plan_of_three_axes_is_what_ranks_send_and_keep(name: str) -> None:
    by_rank = run_on_ranks(2 * RANKS, real_steps, [WIDE[name]])
    compare(plans_of_ends(WIDE[name], 2 * RANKS), [of_rank[0] for of_rank in by_rank])


def stands_in_where_ranks_are_real() -> str:
    world = world_of(STEP, dist.get_world_size())
    try:
        rehearse(world, [0])
    except Exception as error:  # its text is what is tested
        return str(error)
    return "no error"


def test_a_process_that_communicates_does_not_stand_in_for_others() -> None:
    for text in run_on_ranks(2, stands_in_where_ranks_are_real):
        assert text.startswith("a process that communicates cannot stand in for ranks")
