"""Whether ranks that ought to hold equal tensors do, bit by bit, by digest.

Costs a copy of the tensors to the CPU and 8 bytes per tensor on the network.
"""

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

from megatron.errors import NumericsError
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import Group

_NAMES_SHOWN = 5


def check_bitwise_equal(named: Iterable[tuple[str, Tensor]], group: Group, *, problem: str) -> None:
    """Compare tensors bit by bit with those at the same index on all ranks of `group`.

    Raises:
        NumericsError: on every rank, that `problem`, naming tensors that differ.
    """
    if group.size == 1:
        return
    own = [(name, _digest(tensor)) for name, tensor in named]
    everyone = all_gather_object(own, group)
    differing = [
        name
        for index, (name, _) in enumerate(own)
        if any(len(other) != len(own) or other[index] != everyone[0][index] for other in everyone)
    ]
    if differing:
        odd = [rank for rank, digests in zip(group.ranks, everyone) if digests != everyone[0]]
        raise NumericsError(
            problem,
            found=f"{len(differing)} of {len(own)} parameters, "
            f"{', '.join(differing[:_NAMES_SHOWN])}, on ranks {odd} against "
            f"rank {group.ranks[0]}",
            fix="resume from the last checkpoint; if it comes back on the same rank, take that "
            "machine out",
        )


def _digest(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return 0
    return xxhash.xxh3_64_intdigest(flat.cpu().view(torch.uint8).numpy().data)
