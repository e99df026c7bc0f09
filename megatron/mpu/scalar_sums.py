"""Scalars of a step: added up over all ranks in one collective, and read by the host later.

Nothing here waits for the device but `HostScalars.read`. Sums are in float64, so that counts are
exact up to 2^53.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron import device
from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import Group


def flags_on_device(flags: Sequence[bool]) -> Tensor:
    """Return 1 for each flag of the host that is set, else 0: [n] float64."""
    own = torch.zeros(len(flags), dtype=torch.float64, device=device.current())
    for at, is_set in enumerate(flags):
        if is_set:
            own[at].fill_(1.0)  # a copy from the host would wait for the device
    return own


class ScalarSums:
    """Scalars by name that all ranks of `world` add up together.

    Every rank adds the same names in the same order, with as many values each.
    """

    def __init__(self, world: Group) -> None:
        self._world = world
        self._parts: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, *, contributes: bool = True) -> None:
        """Add this rank's summands under a name that is new.

        Args:
            contributes: False where another rank adds the same summands: zeros are added then.
        """
        assert name not in self._parts, name  # noqa: S101  # invariant: engines name each once
        own = values.detach().double().reshape(-1)
        # Not multiplied by zero: what is not finite on this rank would stay so.
        self._parts[name] = own if contributes else torch.zeros_like(own)

    def reduce(self) -> dict[str, Tensor]:
        """Return the sums over all ranks, [n] float64 by name."""
        total = all_reduce(torch.cat(list(self._parts.values())), self._world)
        sizes = [part.numel() for part in self._parts.values()]
        return dict(zip(self._parts, torch.split(total, sizes)))


class HostScalars:
    """Scalars by name that are copied to the host while the device works on."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        flat = [values.detach().double().reshape(-1) for values in named.values()]
        self._sizes = {name: values.numel() for name, values in zip(named, flat)}
        self._copy = device.HostCopy(torch.cat(flat))

    def read(self) -> dict[str, list[float]]:
        """Wait until the values are computed, and return them."""
        parts = torch.split(self._copy.values(), list(self._sizes.values()))
        return {name: part.tolist() for name, part in zip(self._sizes, parts)}
