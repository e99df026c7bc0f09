"""A few training steps of a small GPT on either device, and what came of them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from benchmarks.workload import workload
from megatron.engine.base import StepReport

VOCABULARY = 512

# Large enough that fused attention, tensor cores and several thread blocks take part.
SMALL_GPT = (
    *("--num-layers", "2", "--hidden-size", "128", "--num-attention-heads", "4"),
    *("--seq-length", "128", "--micro-batch-size", "4", "--lr", "1e-3", "--clip-grad", "1.0"),
    *("--log-level", "warning"),
)
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")


class Trained(NamedTuple):
    """What a run saw, and where its weights ended."""

    reports: list[StepReport]
    weights: dict[str, torch.Tensor]  # on the CPU

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [report.loss for report in self.reports]


def train(kind: str, flags: Sequence[str], *, steps: int, repeat: bool = False) -> Trained:
    """Train on the device `kind` on random tokens; with `repeat` on the same ones every time."""
    given = [*SMALL_GPT, "--device", kind, *flags]
    with workload(given, vocab_size=VOCABULARY) as run:
        reports = [run.step(run.tokens(0 if repeat else step)) for step in range(steps)]
        weights = {
            name: value.detach().cpu().clone()
            for name, value in run.engine.stage.named_parameters()
        }
    return Trained(reports, weights)
