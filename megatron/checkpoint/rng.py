"""The default generators of one rank, to and from the flat form that a checkpoint holds.

What the framework draws has names, and no state. A program's own code may draw from the default
generators; their states are valid only for their rank, so they are kept per rank and restored only
into the same grid on the same kind of device. At any other layout the caller seeds anew from (seed,
iteration) and logs it, with the reason that `why_not_restorable` returns.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron import device
from megatron.checkpoint.folder.manifest import GridLayout, Manifest
from megatron.checkpoint.sharded import GeneratorStates
from megatron.json_values import JsonValue
from megatron.mpu.random import default_states, set_default_states
from megatron.mpu.topology import Topology

_SEPARATOR = "/"


def capture() -> GeneratorStates:
    """Return the states of the default generators of torch, NumPy and Python, as they are now."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, JsonValue] = {}
    _flatten(default_states(), "", tensors, values)
    return GeneratorStates(tensors, values)


def restore(states: GeneratorStates) -> None:
    """Continue every generator from where `capture` found it.

    Raises:
        CheckpointError: the states are of another kind of device.
    """
    set_default_states(_unflatten({**states.values, **states.tensors}))


def why_not_restorable(manifest: Manifest, topology: Topology) -> str | None:
    """Return why the saved states cannot be restored in this run; None if they can.

    The kind of device is not in the manifest: call `device_mismatch` with the states.
    """
    if not manifest.generators:
        return "the checkpoint was saved without random states"
    grid = GridLayout.of(topology)
    if manifest.layout != grid:
        return f"random states were saved at {manifest.layout}, this is {grid}"
    if manifest.pp_before_dp != topology.pp_before_dp:
        return "random states were saved with ranks in another order (--use-tp-pp-dp-mapping)"
    return None


def device_mismatch(states: GeneratorStates) -> str | None:
    """Return why states of the right rank cannot be restored: the device differs. Else None."""
    saved, current = states.values.get("device_type"), device.current().type
    if saved == current:
        return None
    return f"random states were saved on {saved}, this run uses {current}"


def _flatten(
    state: Mapping[str, Any], prefix: str, tensors: dict[str, Tensor], values: dict[str, JsonValue]
) -> None:
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, Mapping):
            _flatten(value, name + _SEPARATOR, tensors, values)
        else:
            values[name] = value


def _unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(_SEPARATOR)
        at = state
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return state
