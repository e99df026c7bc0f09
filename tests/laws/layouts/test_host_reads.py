"""No step waits for the device, or leaves it: whole steps run on `meta`, operation by operation.

Ranks of larger worlds stand in as in a plan, so engine, model and schedule are the real ones. What
a reader would get wrong: the collectives are real calls, but nothing arrives, so numbers are not
tested here.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron import device
from megatron.engine.base import PretrainTask
from megatron.initialize import tokenizer_of
from megatron.model.experts.balance import SINKHORN_CHANGE
from megatron.optimizer import optimizer
from megatron.planning import rehearsal
from megatron.planning.calls import CallLog, Phases
from megatron.planning.rehearsal import World, engine_of, run_step, standing_in
from pretrain_bert import bert_task
from pretrain_gpt import gpt_task
from tests.distributed.planning.test_rehearsal import LAYOUTS
from tests.laws.device_guard import ALLOWED, ROOT, DeviceGuard, DeviceViolationError
from tests.support.tiny import tiny_run

META = torch.device("meta")
TASKS = {"gpt": gpt_task, "bert": bert_task}
FP8 = {"bf16": True, "fp8_format": "hybrid", "hidden_size": 64}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp64": {},
    "fp32": {"fp64": False},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "fp8": FP8,
}
TP = {"tensor_model_parallel_size": 2}
FLAGS: dict[str, dict[str, Any]] = {
    "all that masks need": {
        "bf16": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
        "log_num_zeros_in_grad": True,
    },
    "logits at once": {"bf16": True, "cross_entropy_loss_fusion": False},
    "narrow state": {"bf16": True, "exp_avg_dtype": "bf16"},
    "fp16, constant scale": TP | {"fp16": True, "loss_scale": 8.0},
    "fp16, stages": {"fp16": True, "pipeline_model_parallel_size": 2},
    "experts, sinkhorn": {"num_experts": 4, "add_bias_linear": False, "fp64": False}
    | {"moe_router_load_balancing_type": "sinkhorn"},
    "fp8, recomputation": FP8 | TP | {"recompute_granularity": "full", "sequence_parallel": True},
    "fp8, delayed": FP8 | TP | {"fp8_recipe": "delayed"},
    "fp8, blocks of 32": FP8 | TP | {"fp8_recipe": "mxfp8"},
}
ONE_PRODUCT = {"bf16": True, "num_experts": 4, "add_bias_linear": False}


def world_of(flags: dict[str, Any], task: PretrainTask | None = None, size: int = 4) -> World:
    config = tiny_run("nowhere", **flags)
    return World.of(config, task or gpt_task(), tokenizer_of(config), size)


def steps_of(world: World, guard: DeviceGuard | None = None) -> DeviceGuard:
    """Do two steps of the last rank of a world, which has every axis behind it."""
    guard = guard or DeviceGuard()
    rank, stages = world.topology.world_size - 1, world.topology.pp
    gathered, carry = rehearsal._survey(world) if stages > 1 else ([], ())
    with standing_in(world, rank, carry) as context:
        log = CallLog(Phases(), rank, stages=gathered)
        engine = engine_of(world, log.watch(context), Phases())
        for microbatches in (stages, 2):  # the first step makes state, and sends headers
            with guard:
                run_step(engine, world, microbatches)
        assert all(parameter.is_meta for parameter in engine.stage.parameters())
    assert guard.operations
    return guard


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("task", TASKS)
def test_a_step_in_every_precision_reads_no_value_and_mixes_no_devices(
    task: str, precision: str
) -> None:
    assert not steps_of(world_of(PRECISIONS[precision], TASKS[task](), size=1)).used


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_in_every_layout_reads_no_value_and_mixes_no_devices(layout: str) -> None:
    # The two models take turns; what they do not have in common needs no ranks.
    task = [gpt_task, bert_task][list(LAYOUTS).index(layout) % 2]
    check_layout(task(), LAYOUTS[layout])


@pytest.mark.wide
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("task", TASKS)
def test_every_model_in_every_layout_reads_no_value(task: str, layout: str) -> None:
    check_layout(TASKS[task](), LAYOUTS[layout])


def check_layout(task: PretrainTask, flags: dict[str, Any]) -> None:
    used = {path.rpartition("/")[2] for path, _ in steps_of(world_of(flags, task)).used}
    expected = {"executor.py"} if "pipeline_model_parallel_size" in flags else set()
    assert used == expected | ({"mixture.py"} if "num_experts" in flags else set())


@pytest.mark.parametrize("name", FLAGS)
def test_a_step_reads_no_value_and_mixes_no_devices(name: str) -> None:
    steps_of(world_of(FLAGS[name]))


def test_experts_that_are_one_product_wait_for_nothing() -> None:
    assert not steps_of(world_of(ONE_PRODUCT)).used


@pytest.mark.parametrize("flags", [{"bf16": False}, {"moe_expert_capacity_factor": 1.0}], ids=str)
def test_experts_wait_for_the_sizes_of_their_matrices(flags: dict[str, Any]) -> None:
    """The one part of a model that does, as docs/architecture.md says."""
    used = steps_of(world_of(ONE_PRODUCT | flags)).used
    assert used == {("megatron/model/experts/mixture.py", "RowGroups.sizes")}


HOST = torch.ones(3)
CLIPPING = "megatron/optimizer/optimizer.py:"
# What the factor of clipping could do with the norm, on `meta`; and what the error says of it.
BREAKS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "item": (Tensor.item, "aten._local_scalar_dense.default .*the host reads a value"),
    "float": (float, "aten._local_scalar_dense.default .*the host reads a value"),
    "bool": (lambda norm: bool(norm > 1), "aten._local_scalar_dense.default .*reads a value"),
    "tolist": (Tensor.tolist, "aten._to_copy.default .*a copy to the host"),
    "cpu": (Tensor.cpu, "aten._to_copy.default .*a copy to the host"),
    "copy_": (lambda norm: HOST.copy_(norm), "aten.copy_.default .*a copy to the host"),
    "equal": (lambda norm: torch.equal(norm, norm), "aten.equal.default .*are equal"),
    "nonzero": (lambda norm: norm.reshape(1).nonzero(), "aten.nonzero.default .*depends on values"),
    "mask": (lambda norm: norm.reshape(1)[norm.reshape(1) > 1], "aten.index.Tensor .* on a mask"),
    "a tensor of the host": (lambda norm: norm + HOST, "aten.add.Tensor .*not on the device"),
    "made on the host": (lambda _: torch.zeros(3, device="cpu"), "aten.zeros.default .*it makes"),
    "to the device": (lambda _: HOST.to(META), "aten._to_copy.default .*a copy from the host"),
    "values": (lambda _: torch.tensor([1.0], device=META), "tensor .*a copy from the host"),
    "answered": (
        lambda norm: device.values_for_host(norm, SINKHORN_CHANGE),
        "device.values_for_host .*the host reads",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_waits_for_the_device_or_leaves_it_is_named_with_its_line(name: str) -> None:
    broken, words = BREAKS[name]

    def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
        broken(norm)
        return norm

    with (
        patch.object(optimizer, "clip_factor", clip_factor),
        pytest.raises(DeviceViolationError, match=words) as raised,
    ):
        steps_of(world_of({"bf16": True}, size=1))
    # A violation in a function of these tests is one of its caller.
    assert CLIPPING in str(raised.value)


def test_what_is_allowed_is_allowed_to_its_function_alone() -> None:
    world = world_of(LAYOUTS["1f1b"])
    others = {place: why for place, why in ALLOWED.items() if "_communicate" not in place[1]}
    with pytest.raises(DeviceViolationError, match=r"values_for_host at .*executor.py:"):
        steps_of(world, DeviceGuard(others))


def test_numbers_of_the_host_are_arguments_and_no_tensors() -> None:
    values = torch.ones(3, device=META)
    number = torch.tensor(2.0)
    with DeviceGuard() as guard:
        assert (values * number).is_meta
    assert guard.operations == 1


def test_every_allowed_function_is_there() -> None:
    for (path, name), reason in ALLOWED.items():
        assert f"def {name.rpartition('.')[2]}(" in (ROOT / path).read_text(encoding="utf-8")
        assert reason
