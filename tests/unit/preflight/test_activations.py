"""The least that a micro-batch leaves for its backward pass, beside a rehearsed step."""

from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.planning.rehearsal import rehearse
from megatron.preflight.activations import least_activation_bytes
from tests.support.tiny import MODELS, tiny_run
from tests.unit.planning.worlds import OF_TASK, planned_world

# Wide enough that statistics and masks, which the bound leaves out, do not matter.
WIDE: dict[str, Any] = {
    "bf16": True,
    "num_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 4,
    "global_batch_size": 16,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
SELECTIVE = {"recompute_granularity": "selective"}
# Most of a step is counted, but not a group that is computed again, nor what some schedules hold
# beyond one micro-batch for each stage that follows.
MOST, SOME = 0.8, 0.05


@pytest.mark.parametrize(
    ("ranks", "flags", "share"),
    [
        pytest.param(1, {}, MOST, id="plain"),
        pytest.param(1, MODELS["llama"] | {"ffn_hidden_size": 512}, MOST, id="gated"),
        pytest.param(1, {"norm_placement": "after"}, MOST, id="norms after"),
        pytest.param(1, {**FULL, "recompute_num_layers": 2}, SOME, id="groups"),
        pytest.param(
            1, FULL | {"recompute_method": "block", "recompute_num_layers": 3}, MOST, id="some"
        ),
        pytest.param(1, SELECTIVE | {"recompute_modules": ("mlp", "layernorm")}, 0.7, id="modules"),
        pytest.param(1, SELECTIVE | {"recompute_modules": ("act",)}, MOST, id="activation"),
        pytest.param(
            2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, MOST, id="tp"
        ),
        pytest.param(2, {"context_parallel_size": 2}, MOST, id="cp"),
        pytest.param(4, {"pipeline_model_parallel_size": 4}, 0.7, id="pp"),
        pytest.param(
            2,
            {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
            0.4,
            id="interleaved",
        ),
        pytest.param(
            2,
            {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero-bubble"},
            0.4,
            id="zero-bubble",
        ),
        pytest.param(1, OF_TASK["ict"], MOST, id="two towers"),
        pytest.param(
            2,
            OF_TASK["ict"] | {"pipeline_model_parallel_size": 2},
            0.4,
            id="two towers, two stages",
        ),
        pytest.param(1, OF_TASK["ict"] | FULL, SOME, id="two towers, recomputed"),
        pytest.param(1, OF_TASK["vit"] | {"patch_dim": 1}, MOST, id="patches"),
        pytest.param(1, OF_TASK["prefix-lm"], MOST, id="prefixes"),
        pytest.param(1, OF_TASK["t5"] | {"decoder_seq_length": 64}, 0.5, id="two stacks"),
    ],
)
def test_every_stage_of_a_rehearsed_step_takes_more(
    ranks: int, flags: dict[str, Any], share: float
) -> None:
    world = planned_world(ranks, **{**WIDE, "fp64": False, **flags})
    num_towers = world.task.reads.kind(world.config.data).num_towers
    bounds = least_activation_bytes(world.config, world.topology.dp, num_towers=num_towers)
    plans = rehearse(world, world.representatives())
    for bound, plan in zip(bounds, plans, strict=True):
        assert share <= bound / plan.bytes.step <= 1


def least(ranks: int = 1, **flags: Any) -> tuple[int, ...]:
    return least_activation_bytes(tiny_run("nowhere", **flags), ranks)


def test_what_is_not_known_beforehand_is_not_counted() -> None:
    assert least() > (0,)
    assert least(eval_only=True, eval_iters=1) == (0,)
    two = {"pipeline_model_parallel_size": 2, "num_layers": 4}
    assert least(**two) > (0, 0)
    assert least(**two, pipeline_balance="parameters") == (0, 0)
    experts = {"num_experts": 2, "add_bias_linear": False}
    assert least(**experts) < least()


def test_a_curriculum_begins_with_short_samples() -> None:
    grows = {
        "curriculum_schedule": "fixed_linear",
        "curriculum_seqlen_min": 4,
        "curriculum_iters": 10,
        "curriculum_seqlen_step": 4,
    }
    length = tiny_run("nowhere").data.seq_length
    assert least(**grows)[0] * length == least()[0] * 4


def test_layers_that_wait_in_host_memory_take_none_of_the_device() -> None:
    assert least(cpu_offloading_num_layers=1)[0] * 2 == least()[0]
    assert least(checkpoint_in_cpu=True) == (0,)
    # A group waits there whole, with the first of its layers.
    assert least(**FULL, recompute_num_layers=2, cpu_offloading_num_layers=1) == (0,)


def test_layers_that_are_recomputed_together_save_one_input() -> None:
    assert least(**FULL, recompute_num_layers=2)[0] * 2 == least(**FULL)[0]


def test_saved_inputs_can_be_split_over_tensor_parallel_ranks() -> None:
    split = {"tensor_model_parallel_size": 2, **FULL}
    assert least(**split, distribute_saved_activations=True)[0] * 2 == least(**split)[0]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="micro-batch"):
        least(3, global_batch_size=4, micro_batch_size=4)
