"""Wrong and failing operations are found in every dtype of a run, and a right machine passes."""

import pytest
import torch
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.errors import MachineError
from megatron.mpu.context import Group
from megatron.preflight import probe
from megatron.preflight.probe import dtypes_of, operation_problem, probe_machine

ALONE = Group(ranks=(0,), rank=0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (torch.float32, torch.int64)),
        ({"bf16": True}, (torch.bfloat16, torch.float32, torch.int64)),
        ({"fp64": True}, (torch.float64, torch.float32, torch.int64)),
    ],
)
def test_the_dtypes_are_those_of_the_run(
    flags: dict[str, bool], expected: tuple[torch.dtype, ...]
) -> None:
    assert dtypes_of(PrecisionConfig(**flags)) == expected


def test_a_machine_that_computes_right_passes_in_every_dtype() -> None:
    probe_machine(DTYPES, ALONE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_element_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    to = Tensor.to

    def flipped(tensor: Tensor, *args: object) -> Tensor:
        moved = to(tensor, *args)  # type: ignore[call-overload]
        if moved.dtype is dtype and moved.dim() == 2:
            moved = moved.clone()
            moved[3, 5] += 1
        return moved  # type: ignore[no-any-return]

    assert operation_problem(dtype) is None
    monkeypatch.setattr(Tensor, "to", flipped)
    with pytest.raises(MachineError, match="wrong results") as caught:
        probe_machine(DTYPES, ALONE)
    operation = "matmul" if dtype.is_floating_point else "sum"
    name = str(dtype).removeprefix("torch.")
    assert f"rank 0: {operation} in {name} has " in caught.value.found
    assert caught.value.found.count(" in ") == 1, "the other dtypes are right"


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("no kernel image is available\nfor this device", "no kernel image is available"),
        ("", "RuntimeError"),
    ],
)
def test_an_operation_that_the_device_does_not_have_is_named(
    monkeypatch: pytest.MonkeyPatch, message: str, found: str
) -> None:
    matmul = Tensor.__matmul__

    def refused(self: Tensor, other: Tensor) -> Tensor:
        if self.dtype is torch.bfloat16:
            raise RuntimeError(message)
        return matmul(self, other)

    monkeypatch.setattr(Tensor, "__matmul__", refused)
    with pytest.raises(MachineError) as caught:
        probe_machine(DTYPES, ALONE)
    assert caught.value.found == f"rank 0: matmul in bfloat16 failed ({found})"


def test_a_collective_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensor: Tensor, group: Group) -> Tensor:
        raise RuntimeError("connection reset")

    monkeypatch.setattr(probe, "all_reduce", fail)
    with pytest.raises(MachineError, match="sum over all ranks failed") as caught:
        probe_machine(DTYPES, ALONE)
    assert caught.value.found == "rank 0, all_reduce in bfloat16: connection reset"
