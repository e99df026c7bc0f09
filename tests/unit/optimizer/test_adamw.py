"""AdamW over slots: state that waits on the host is updated to the same bits, part by part."""

from functools import partial

import pytest
import torch
from torch.nn import Parameter

from megatron.ops.adamw import AdamwRule
from megatron.optimizer.adamw import update_slots
from megatron.optimizer.host_state import HostState
from megatron.optimizer.slots import Slot, StepScalars

RULE = AdamwRule(0.01, 0.9, 0.99, 1e-8, 0.1)
SHAPES = ((3, 7), (40,), (1,), (5, 5))


def slots_of(dtype: torch.dtype, host: HostState | None) -> list[Slot]:
    """Some parameters, of which a host keeps the state of all but the last."""
    drawn = torch.Generator().manual_seed(1)
    slots = []
    for at, shape in enumerate(SHAPES):
        parameter = Parameter(torch.randn(shape, generator=drawn).to(dtype))
        values = parameter.detach()
        weight = values.float() if dtype == torch.bfloat16 else values
        state = {
            "exp_avg": torch.zeros_like(weight, dtype=torch.bfloat16),
            "exp_avg_sq": torch.zeros_like(weight),
        }
        on_host = host is not None and at < len(SHAPES) - 1
        if host is not None and on_host:
            weight = weight if weight is values else host.keep(weight)
            state = {kind: host.keep(tensor) for kind, tensor in state.items()}
        slots.append(Slot(f"w{at}", parameter, None, values, weight, state, on_host))
    return slots


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part_bytes", [1, 400, 1 << 20])
def test_state_on_the_host_is_updated_to_the_same_bits(
    dtype: torch.dtype, part_bytes: int, applied: bool
) -> None:
    host = HostState(part_bytes=part_bytes)
    everywhere = [slots_of(dtype, None), slots_of(dtype, host)]
    scalar = partial(torch.tensor, dtype=torch.float64)
    drawn = torch.Generator().manual_seed(2)
    for step in range(3):
        gradients = {f"w{at}": torch.randn(s, generator=drawn) for at, s in enumerate(SHAPES)}
        counts = applied or step == 0
        scalars = StepScalars(scalar(0.5), torch.tensor(counts), scalar(step + 1.0))
        for slots in everywhere:
            update_slots(slots, gradients, RULE, scalars, host)
    host.settle()
    for one, other in zip(*everywhere, strict=True):
        assert torch.equal(one.values, other.values)
        assert one.tensors().keys() == other.tensors().keys()
        for kind, tensor in one.tensors().items():
            assert torch.equal(tensor, other.tensors()[kind]), kind
