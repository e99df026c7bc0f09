"""Whether the device computes and the backend communicates: tiny operations with known results.

They run once the ranks have joined, in every dtype of the run, so that a broken device, driver or
network is an error with its name rather than a loss that is wrong. All values are small whole
numbers, which every dtype holds exactly. What a reader would get wrong: a collective that fails on
one rank may leave the others waiting; the watch over ranks ends those.
"""

import torch

from megatron import device
from megatron.config.precision import PrecisionConfig
from megatron.errors import MachineError, first_line
from megatron.mpu.collectives import all_gather_object, all_reduce
from megatron.mpu.context import Group

_SIDE = 16  # of the matrices: FP16 and BF16 on GPUs take kernels for multiples of 8


def dtypes_of(precision: PrecisionConfig) -> tuple[torch.dtype, ...]:
    """Return the dtypes in which a run computes or communicates, each once."""
    names = (precision.precision.value, precision.gradient_precision.value, "float32", "int64")
    return tuple(getattr(torch, name) for name in dict.fromkeys(names))


def probe_machine(dtypes: tuple[torch.dtype, ...], world: Group) -> None:
    """Check operations on this device, and sums over all ranks, in each of `dtypes`.

    Raises:
        MachineError: on every rank, naming ranks, operations and dtypes with a wrong result.
    """
    found = [operation_problem(dtype) for dtype in dtypes]
    found += [collective_problem(dtype, world) for dtype in dtypes]
    problems_of_ranks = all_gather_object([problem for problem in found if problem], world)
    lines = [
        f"rank {world.ranks[index]}: {', '.join(problems)}"
        for index, problems in enumerate(problems_of_ranks)
        if problems
    ]
    if lines:
        raise MachineError(
            "the device or the network gives wrong results",
            found="; ".join(lines),
            fix="take the node of these ranks out of the job; look at its driver and its memory",
        )


def operation_problem(dtype: torch.dtype) -> str | None:
    """Return what is wrong with a product of matrices in `dtype`; None where it is right.

    Whole numbers are multiplied by element and summed instead: GPUs have no such product.
    """
    values = torch.arange(_SIDE * _SIDE).view(_SIDE, _SIDE) % 3
    expected = values @ values if dtype.is_floating_point else (values * values).sum(0)
    name = "matmul" if dtype.is_floating_point else "sum"
    try:
        here = values.to(device.current(), dtype)
        result = here @ here if dtype.is_floating_point else (here * here).sum(0)
        wrong = int((result.cpu().double() != expected.double()).sum())
    except RuntimeError as error:
        return f"{name} in {_name(dtype)} failed ({first_line(error)})"
    if wrong:
        return f"{name} in {_name(dtype)} has {wrong} of {expected.numel()} wrong elements"
    return None


def collective_problem(dtype: torch.dtype, world: Group) -> str | None:
    """Return what is wrong with a sum over all ranks in `dtype`; None where it is right.

    Each rank adds 1 at its own place, so that the sum shows which ranks are missing.

    Raises:
        MachineError: the backend raised.
    """
    own = torch.zeros(world.size, dtype=dtype, device=device.current())
    own[world.rank] = 1
    try:
        result = all_reduce(own, world).cpu().double()
    except RuntimeError as error:
        raise MachineError(
            "a sum over all ranks failed",
            found=f"rank {world.ranks[world.rank]}, all_reduce in {_name(dtype)}: {error}",
            fix="look at the network of this node, and at --distributed-backend",
        ) from error
    wrong = [world.ranks[index] for index in (result != 1).nonzero().flatten().tolist()]
    if wrong:
        ranks = ", ".join(map(str, wrong[:4])) + (", ..." if len(wrong) > 4 else "")
        return f"all_reduce in {_name(dtype)} has wrong parts of ranks {ranks}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
