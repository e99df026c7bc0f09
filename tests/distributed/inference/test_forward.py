"""Two tensor-parallel ranks score and embed a prompt as one does, in parts."""

import torch
import torch.distributed as dist

from megatron.inference.forward import ForwardExecutor
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice
from tests.support.models import tiny_build, tiny_config, tiny_model
from tests.support.ranks import run_on_ranks

PROMPT = (7, 3, 9, 1, 5, 8, 2)
# float64 hidden states, and float32 log-probabilities of float64 scores.
CLOSE = 1e-6


def scored_and_embedded(ctx: ParallelContext) -> tuple[list[float], torch.Tensor]:
    """Return log-probabilities of a prompt, and its last hidden states."""
    model = tiny_model(tiny_config(), tiny_build(ctx)).eval()
    executor = ForwardExecutor(model, ctx, blocks=1)
    logprobs: list[float] = []
    hidden = []
    for start, end in ((0, 3), (3, 7)):
        part = SequenceSlice(
            0, PROMPT[start:end], start, (0,), False, targets=PROMPT[start + 1 : end + 1],
            top_targets=1, embeds=True,
        )  # fmt: skip
        (found,) = executor.run(ForwardPlan((), (part,)), {})
        logprobs += [each.chosen for each in found.targets]
        assert found.hidden is not None
        hidden.append(found.hidden)
    return logprobs, torch.cat(hidden)


def scored_and_embedded_on_ranks() -> tuple[list[float], torch.Tensor]:
    return scored_and_embedded(ParallelContext.build(Topology(tp=dist.get_world_size())))


def test_prompts_are_scored_and_embedded_alike_on_two_ranks() -> None:
    expected, states = scored_and_embedded(ParallelContext.single())
    assert len(expected) == len(PROMPT) - 1
    for logprobs, hidden in run_on_ranks(2, scored_and_embedded_on_ranks):
        torch.testing.assert_close(
            torch.tensor(logprobs), torch.tensor(expected), rtol=0, atol=CLOSE
        )
        torch.testing.assert_close(hidden, states, rtol=0, atol=CLOSE)
