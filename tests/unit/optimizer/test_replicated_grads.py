"""What is summed over tensor-parallel ranks, in one process; tests/distributed has the sums."""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.partition import Init, Partition, set_parameter_metadata
from megatron.optimizer import replicated_grads
from megatron.optimizer.replicated_grads import check_replicated_agree, reduce_replicated

TWO = Group((0, 1), 0)


def parameter(
    dtype: torch.dtype = torch.float32, *, sequence_parallel: bool, partition: Any = None
) -> Parameter:
    made = Parameter(torch.ones(2, 3, dtype=dtype))
    set_parameter_metadata(
        made, init=Init("ones"), partition=partition, sequence_parallel=sequence_parallel
    )
    made.main_grad = torch.ones(2, 3, dtype=dtype)  # type: ignore[attr-defined]
    return made


def test_alone_nothing_is_summed() -> None:
    tp = ParallelContext.single().tp
    partial = parameter(sequence_parallel=True)
    reduce_replicated([partial], tp)
    assert partial.main_grad.tolist() == [[1] * 3] * 2
    check_replicated_agree([("partial", partial)], tp)


def test_only_summands_are_summed_in_one_collective_per_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[int, torch.dtype]] = []

    def doubled(tensor: torch.Tensor, group: Group) -> torch.Tensor:
        assert group is TWO
        sent.append((tensor.numel(), tensor.dtype))
        return tensor.mul_(2)

    monkeypatch.setattr(replicated_grads, "all_reduce", doubled)
    partial = [parameter(sequence_parallel=True) for _ in range(2)]
    wide = parameter(torch.float64, sequence_parallel=True)
    equal = parameter(sequence_parallel=False)
    split = parameter(sequence_parallel=False, partition=Partition("tp", dim=0))
    frozen = parameter(sequence_parallel=True).requires_grad_(False)
    reduce_replicated([partial[0], equal, wide, split, frozen, partial[1]], TWO)
    assert sorted(sent, key=str) == [(12, torch.float32), (6, torch.float64)]
    for found, expected in [(wide, 2), *[(p, 2) for p in partial], (equal, 1), (split, 1)]:
        assert found.main_grad.tolist() == [[expected] * 3] * 2
    assert frozen.main_grad.tolist() == [[1] * 3] * 2
