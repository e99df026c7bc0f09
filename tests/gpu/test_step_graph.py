"""Steps that are captured as a CUDA graph: the bits of those that are not, and one launch each."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.workload import workload
from megatron.engine.step_graph import WARMUP_STEPS
from tests.gpu.steps import NO_DROPOUT, SMALL_GPT, VOCABULARY, train

pytestmark = pytest.mark.gpu

STEPS = WARMUP_STEPS + 4
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0")
CASES = {
    "fp32": NO_DROPOUT,
    "bf16, dropout": (*DROPOUT, "--bf16"),
    "bf16, two micro-batches": (*DROPOUT, "--bf16", "--global-batch-size", "8"),
    "fp16, a loss scale that moves": (
        *(*NO_DROPOUT, "--fp16", "--initial-loss-scale", str(2.0**36)),
        *("--hysteresis", "1"),
    ),
    "recomputed": (*DROPOUT, "--bf16", "--recompute-granularity", "full"),
    "logits at once": (*NO_DROPOUT, "--bf16", "--no-cross-entropy-loss-fusion"),
}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", CASES)
def test_a_captured_step_is_the_step(name: str) -> None:
    plain = train("cuda", CASES[name], steps=STEPS)
    captured = train("cuda", [*CASES[name], "--cuda-graph"], steps=STEPS)
    assert captured.reports == plain.reports
    for weight, value in plain.weights.items():
        assert torch.equal(captured.weights[weight], value), weight


def operators_called(flags: tuple[str, ...]) -> int:
    """How many operators of PyTorch the host calls in a step after the first ones."""
    with workload([*SMALL_GPT, "--device", "cuda", "--bf16", *flags], vocab_size=VOCABULARY) as run:
        for step in range(STEPS):
            run.step(run.tokens(step))
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            run.step(run.tokens(STEPS))
    return sum(row.count for row in seen.key_averages() if row.key.startswith("aten::"))


def test_a_captured_step_calls_few_operators() -> None:
    captured = operators_called((*NO_DROPOUT, "--cuda-graph"))
    assert captured < operators_called(NO_DROPOUT) / 3
