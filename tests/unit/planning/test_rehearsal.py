"""Steps of ranks that are not there; that plans are what real ranks do is in tests/distributed."""

import sys
from typing import Any

import pytest
import torch.distributed as dist

from megatron.errors import ConfigError, MachineError, MegatronError
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Coord
from megatron.ops import cpu_products
from megatron.planning import rehearsal
from megatron.planning.calls import Phases
from megatron.planning.meter import OpMeter
from megatron.planning.rehearsal import (
    World,
    engine_of,
    flops_of_model,
    rehearse,
    run_step,
)
from tests.unit.planning.worlds import OF_TASK
from tests.unit.planning.worlds import planned_world as world_of

# On `meta` torch makes other small tensors within some operations, and on a CPU our loss keeps the
# memory of its logits.
PEAK = 0.01

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform"}

WIDE = pytest.mark.wide

PIPELINE: dict[str, Any] = {
    "bf16": True,
    "num_layers": 4,
    "pipeline_model_parallel_size": 2,
    "global_batch_size": 9,
}


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({}, id="1f1b"),
        pytest.param({"num_virtual_stages_per_pipeline_rank": 2}, id="interleaved"),
        pytest.param({"pipeline_schedule": "gpipe"}, marks=WIDE, id="gpipe"),
        pytest.param({"pipeline_schedule": "zero-bubble"}, marks=WIDE, id="zero-bubble"),
        pytest.param(RECOMPUTED, marks=WIDE, id="recomputation"),
    ],
)
def test_few_microbatches_tell_of_all(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(2, **PIPELINE, **flags)
    few = rehearse(world, world.representatives())
    assert len(rehearsal._few(world)) == 2
    monkeypatch.setattr(rehearsal, "_few", lambda of: (of.microbatches,))
    assert few == rehearse(world, world.representatives())


def test_groups_are_those_of_the_grid_in_a_world_of_512() -> None:
    flags = {
        **{"bf16": True, "num_layers": 8, "num_attention_heads": 8, "global_batch_size": 32},
        **{"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 8},
        **{"context_parallel_size": 2, "sequence_parallel": True},
        **{"use_distributed_optimizer": True},
    }
    world = world_of(512, **flags)
    rank = world.topology.rank(Coord(pp=3, dp=5, cp=1, tp=2))
    (plan,) = rehearse(world, [rank])
    groups = {kind.axis: kind.ranks for kind in plan.calls if kind.operation != "send"}
    assert groups["tp"] == world.topology.peers(rank, "tp")
    assert groups["dp_cp"] == world.topology.peers(rank, "dp", "cp")
    assert groups["world"] == tuple(range(512))
    sent = {(kind.axis, kind.ranks) for kind in plan.calls if kind.operation == "send"}
    ring, stages = world.topology.peers(rank, "cp"), world.topology.peers(rank, "pp")
    assert ("cp", (rank, next(other for other in ring if other != rank))) in sent
    assert {ranks for axis, ranks in sent if axis == "pp"} == {
        (rank, stages[2]),
        (rank, stages[4]),
    }
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "flags",
    [
        {"swiglu": True, "position_embedding_type": "rope", "tensor_model_parallel_size": 2},
        RECOMPUTED,
        {"num_experts": 4, "moe_router_topk": 2, "add_bias_linear": False},
        {"context_parallel_size": 2, "cp_comm_type": "a2a"},
        {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    ],
)
def test_counted_flops_are_those_of_the_formula(flags: dict[str, Any]) -> None:
    world = world_of(4, bf16=True, **flags)
    (plan,) = rehearse(world, world.representatives())
    tokens = world.samples * world.config.data.seq_length
    counted = sum(plan.flops.values()) * world.topology.stage_size
    assert counted == tokens * flops_of_model(world)[1]


@pytest.mark.parametrize(
    "flags",
    [
        {"cross_entropy_loss_fusion": False},
        {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"},
        RECOMPUTED,
        {
            "recompute_granularity": "selective",
            "recompute_modules": ("layernorm", "act"),
            # So that activations are the most of it.
            **{"num_layers": 4, "micro_batch_size": 8, "global_batch_size": 16, "seq_length": 128},
            **{"max_position_embeddings": 128},
        },
        {"num_experts": 4, "moe_router_topk": 4, "add_bias_linear": False},
        *OF_TASK.values(),
    ],
)
def test_the_peak_is_that_of_tensors_on_a_cpu(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks that other CPUs widen are not planned.
    monkeypatch.setattr(cpu_products, "onednn_multiplies", lambda dtype: True)
    world = world_of(1, **({"bf16": True, "hidden_size": 64} | flags))
    (plan,) = rehearse(world, [0])
    phases = Phases()
    with OpMeter(phases) as meter:
        engine = engine_of(world, ParallelContext.single(), phases)
        run_step(engine, world, 1)
        meter.reading()
        run_step(engine, world, world.microbatches)
        flops, peak = meter.reading()
    assert plan.flops == flops
    assert plan.bytes.peak == pytest.approx(peak, rel=PEAK)


def test_a_plan_of_a_bert() -> None:
    world = world_of(4, task="bert", bf16=True, tensor_model_parallel_size=2)
    (plan,) = rehearse(world, [3])
    assert plan.coord == Coord(pp=0, dp=1, cp=0, tp=1)
    assert {kind.axis for kind in plan.calls} >= {"tp", "dp_cp", "dp", "world"}


def test_packed_rows_are_planned_too() -> None:
    plain, packed = (world_of(1, bf16=True, sft=sft) for sft in (False, True))
    (of_text,), (of_rows,) = (rehearse(world, [0]) for world in (plain, packed))
    assert of_rows.flops == of_text.flops
    assert of_rows.bytes.peak > of_text.bytes.peak  # masks by document
    (of_prefixes,) = rehearse(world_of(1, task="prefix-lm", bf16=True), [0])
    assert of_prefixes.flops == of_text.flops
    assert of_prefixes.bytes.peak > of_rows.bytes.peak  # the same masks, and which tokens they show


def test_samples_of_a_kind_that_is_not_planned_are_refused() -> None:
    with pytest.raises(ConfigError, match="samples of this kind are not planned") as raised:
        rehearse(world_of(1, noise_density=0.15), [0])
    assert raised.value.found == "windows of text with spans to write"


def test_a_torch_without_the_fake_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.fake_pg", None)
    with pytest.raises(MachineError, match="fake process group is not where it is looked for"):
        rehearse(world_of(1), [0])


def test_ranks_that_there_are_not_are_named() -> None:
    with pytest.raises(ConfigError, match="no such ranks") as raised:
        rehearse(world_of(4), [0, 4, -1])
    assert raised.value.found == "rank 4, -1 of 4 ranks"
    assert raised.value.fix == "choose among 0 to 3"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"tensor_model_parallel_size": 3}, "ranks do not divide into whole model replicas"),
        ({"optimizer": "sgd"}, "does not support a flag of the run"),
        ({"deepspeed": True}, "does not support a flag of the run"),
        ({"checkpoint_in_cpu": True} | RECOMPUTED, "does not support a flag of the run"),
        ({"cpu_offloading_num_layers": 1}, "does not support a flag of the run"),
        ({"global_batch_size": 6}, "global batch"),
    ],
)
def test_a_world_that_cannot_be_is_refused(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        world_of(4, **flags)


def test_stages_that_hand_over_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    survey = rehearsal._survey

    def narrower(world: World) -> Any:
        objects, carries = survey(world)
        return objects, tuple(
            tuple(one._replace(shape=(*one.shape[:-1], 8)) for one in carry) for carry in carries
        )

    monkeypatch.setattr(rehearsal, "_survey", narrower)
    with pytest.raises(MegatronError, match="hands over something else than the same layers"):
        rehearse(world_of(2, **PIPELINE), [0])


def test_graphs_are_left_out_of_a_plan() -> None:
    training = world_of(1, compile=True, cuda_graph=True).config.training
    assert (training.compile, training.cuda_graph) == (False, False)
