"""What is shown of a stage while it runs: every floating output, and its gradient, and no more."""

import torch
from torch import Tensor, nn

from megatron.engine.module_trace import TensorKind, observed


class Pair(nn.Module):
    """Hands on a number and an index."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden * 2, torch.zeros(1, dtype=torch.int64)


def test_outputs_and_their_gradients_are_shown_in_the_order_of_the_passes() -> None:
    stage = nn.Sequential(nn.Linear(2, 2), Pair())
    seen: list[tuple[str, TensorKind, list[int]]] = []
    with observed(stage, lambda name, kind, tensor: seen.append((name, kind, [*tensor.shape]))):
        stage(torch.ones(3, 2))[0].sum().backward()
    assert seen == [
        ("0", TensorKind.OUTPUT, [3, 2]),
        ("1", TensorKind.OUTPUT, [3, 2]),
        ("1", TensorKind.OUTPUT_GRADIENT, [3, 2]),
        ("0", TensorKind.OUTPUT_GRADIENT, [3, 2]),
    ]
    stage(torch.ones(3, 2))
    assert len(seen) == 4, "hooks stay behind"


def test_kinds_are_in_the_order_of_a_step() -> None:
    assert [str(kind) for kind in sorted(TensorKind)] == [
        "parameter",
        "output (forward)",
        "loss",
        "gradient of the output (backward)",
        "gradient of the parameter (backward)",
    ]
