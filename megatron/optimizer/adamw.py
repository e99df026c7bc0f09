"""AdamW over the slots of an optimizer, wherever their state is."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from megatron.ops.adamw import AdamwRule, AdamwTensors, adamw_step_
from megatron.optimizer.host_state import HostState
from megatron.optimizer.slots import Slot, StepScalars


def update_slots(
    slots: Sequence[Slot],
    gradients: Mapping[str, Tensor],
    rule: AdamwRule,
    scalars: StepScalars,
    host: HostState,
) -> None:
    """Update weights, state and the model's half-precision parameters in one pass.

    Args:
        gradients: by the name of the slot, of as many elements, contiguous.
        host: has the state of the slots that are on it.
    """
    alike: defaultdict[tuple[object, ...], list[Slot]] = defaultdict(list)
    for slot in slots:
        dtypes = (slot.weight.dtype, slot.values.dtype, gradients[slot.name].dtype)
        alike[*dtypes, slot.on_host].append(slot)
    for (*_, on_host), together in alike.items():
        there = [[gradients[slot.name], slot.values, *_kept(slot)] for slot in together]
        for tensors in _from_host(together, there, host) if on_host else (there,):
            adamw_step_(_as_operands(tensors), rule, **scalars._asdict())


def _kept(slot: Slot) -> list[Tensor]:
    """Return the means, and the master if there is one."""
    means = [slot.state["exp_avg"], slot.state["exp_avg_sq"]]
    return [*means, slot.weight] if slot.has_master else means


def _from_host(
    slots: Sequence[Slot], there: Sequence[Sequence[Tensor]], host: HostState
) -> Iterator[list[list[Tensor]]]:
    """Yield parts of the tensors of some slots, all on the device."""
    for pieces, of_host in host.parts([_kept(slot) for slot in slots]):
        yield [
            [tensor.view(-1)[start:stop] for tensor in there[index][:2]] + kept
            for (index, start, stop), kept in zip(pieces, of_host)
        ]


def _as_operands(tensors: Sequence[Sequence[Tensor]]) -> AdamwTensors:
    """Return lists by role of [gradient, values, two means, and the master if there is one]."""
    grads, values, means, squares, *masters = (list(of_one) for of_one in zip(*tensors))
    return AdamwTensors(
        weights=masters[0] if masters else values,
        grads=grads,
        means=means,
        squares=squares,
        published=values if masters else [],
    )
