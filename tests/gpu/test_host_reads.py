"""What `meta` cannot show of a step: no call of CUDA in it waits for the device."""

import math
from typing import Any

import pytest
import torch

from megatron import device
from megatron.engine.base import StepPlan
from megatron.ops.quantize import Blocks
from megatron.ops.scaled_matmul import runs_on
from tests.support.tiny import TOKENS_PER_SAMPLE
from tests.unit.engine.engines import tiny_batches, tiny_engine

pytestmark = pytest.mark.gpu

PLAN = StepPlan(2, 2, 0.01, 0.1, TOKENS_PER_SAMPLE, 0)


def pinned() -> list[dict[str, torch.Tensor]]:
    return [{"text": batch["text"].pin_memory()} for batch in tiny_batches(2)]


DELAYED = {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "delayed", "hidden_size": 64}


@pytest.mark.parametrize(
    "flags", [{"bf16": True}, {"fp16": True}, {"fp64": False, "optimizer": "sgd"}, DELAYED], ids=str
)
def test_a_step_waits_for_nothing(flags: dict[str, Any]) -> None:
    device.select("cuda", 0)
    if flags is DELAYED and not runs_on(Blocks.TENSOR, device.capability()):
        pytest.skip("needs another CUDA device")
    engine = tiny_engine(device="cuda", **flags)
    engine.train_step(iter(pinned()), PLAN)  # libraries wait when they start
    batches = pinned()
    torch.cuda.set_sync_debug_mode("error")
    try:
        report = engine.start_step(iter(batches), PLAN, (True, False))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(report().loss)
