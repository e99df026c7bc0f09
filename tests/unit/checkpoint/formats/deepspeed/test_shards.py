"""What DeepSpeed's kinds of optimizers hold of a parameter, from files made by hand."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.formats.deepspeed.shards import (
    FlatRange,
    RankTensors,
    rank_state,
    shape_of_shares,
)
from megatron.errors import CheckpointError

MATRIX, BIAS = torch.arange(12.0).view(4, 3), torch.arange(4.0)
WEIGHTS = {"m": MATRIX, "b": BIAS}


def moments(number: float, *shapes: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    return {
        at: {"step": torch.tensor(5.0), "exp_avg": torch.full(shape, number)}
        for at, shape in enumerate(shapes)
    }


def values(held: RankTensors, kind: str) -> Tensor:
    target = torch.full(held.shape, float("nan"))
    held.read_into(target, kind, Box((0,) * len(held.shape), held.shape), "it")
    return target


def test_a_box_is_read_across_ranges() -> None:
    flat = MATRIX.view(-1)
    held = RankTensors((4, 3), {"weight": [FlatRange(0, flat[:5]), FlatRange(5, flat[5:])]})
    target = torch.zeros(2, 2)
    held.read_into(target, "weight", Box((1, 1), (2, 2)), "it")
    assert torch.equal(target, MATRIX[1:3, 1:3])


def test_ranges_with_a_hole_are_an_error() -> None:
    held = RankTensors((4, 3), {"weight": [FlatRange(0, MATRIX.view(-1)[:5])]})
    with pytest.raises(CheckpointError, match=r"do not make a tensor up\n.*5 of 12"):
        values(held, "weight")


def test_a_state_dict_of_torch_is_numbered_in_the_order_that_is_given() -> None:
    base = {"state": moments(1.0, (4,), (4, 3)), "param_groups": [{"params": [0, 1]}]}
    state = rank_state({"optimizer": base}, [], WEIGHTS, ["b", "m"])
    assert state.steps == 5
    assert values(state.held["b"], "exp_avg").shape == (4,)
    assert values(state.held["m"], "exp_avg").shape == (4, 3)


def test_without_an_order_matrices_come_first_as_megatron_groups_them() -> None:
    groups = [{"params": [0]}, {"params": [1]}]
    base = {"state": moments(1.0, (4, 3), (4,)), "param_groups": groups}
    state = rank_state({"optimizer": base}, [], {"b": BIAS, "m": MATRIX}, [])
    assert values(state.held["m"], "exp_avg").shape == (4, 3)
    with pytest.raises(CheckpointError, match=r"b is \(4,\), its exp_avg \(4, 3\)"):
        rank_state({"optimizer": base}, [], WEIGHTS, ["b", "m"])


def test_another_number_of_parameters_than_names_is_an_error() -> None:
    base = {"state": {}, "param_groups": [{"params": [0]}]}
    with pytest.raises(CheckpointError, match="1 parameters in the optimizer, 2 named"):
        rank_state({"optimizer": base}, [], WEIGHTS, ["m", "b"])


def test_masters_of_half_precision_stand_beside_the_state() -> None:
    base = {"state": moments(1.0, (4, 3), (4,)), "param_groups": [{"params": [0, 1]}]}
    wrapped = {"optimizer_state_dict": base, "fp32_groups": [[MATRIX, BIAS]], "cur_scale": 2.0}
    state = rank_state({"optimizer": wrapped}, [], WEIGHTS, ["m", "b"])
    assert torch.equal(values(state.held["m"], "master"), MATRIX)
    assert state.scaler is wrapped


def test_groups_made_flat_by_a_fused_optimizer_are_cut_into_parameters() -> None:
    flat = torch.cat([MATRIX.view(-1), BIAS])
    base = {"state": moments(1.0, (16,)), "param_groups": [{"params": [0]}]}
    wrapped = {"optimizer_state_dict": base, "fp32_groups_flat": [flat]}
    state = rank_state({"optimizer": wrapped}, [], WEIGHTS, ["m", "b"])
    assert torch.equal(values(state.held["b"], "master"), BIAS)
    longer = wrapped | {"fp32_groups_flat": [torch.cat([flat, flat])]}
    with pytest.raises(CheckpointError, match="more elements than the parameters"):
        rank_state({"optimizer": longer}, [], WEIGHTS, ["m", "b"])


def test_without_an_optimizer_there_are_weights_alone() -> None:
    state = rank_state({"optimizer": None}, [], WEIGHTS, [])
    assert state.steps is None
    assert torch.equal(values(state.held["m"], "weight"), MATRIX)


def share(start: int, stop: int, where: dict[str, tuple[int, int]], step: Any = 5) -> Any:
    flat = torch.cat([MATRIX.view(-1), BIAS])[start:stop]
    slices = {n: Namespace(start=at, numel=numel) for n, (at, numel) in where.items()}
    return {
        "optimizer_state_dict": {
            "base_optimizer_state": [{"exp_avg": flat + 100, "step": step}],  # an elastic file's
            "single_partition_of_fp32_groups": [flat],
            "param_slice_mappings": [slices],
        }
    }


SHAPES = {"param_shapes": [{"m": torch.Size((4, 3)), "b": torch.Size((4,))}]}


def test_shares_of_zero_1_and_2_go_on_where_the_one_before_stopped() -> None:
    shares = [share(0, 7, {"m": (0, 7)}), share(7, 16, {"m": (0, 5), "b": (5, 4)})]
    state = rank_state(SHAPES, shares, WEIGHTS, [])
    assert torch.equal(values(state.held["m"], "exp_avg"), MATRIX + 100)
    assert torch.equal(values(state.held["b"], "master"), BIAS)
    assert shape_of_shares(SHAPES) == {"m": (4, 3), "b": (4,)}


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([share(0, 16, {"m": (0, 13), "b": (12, 4)})], "more than m"),
        ([share(0, 16, {"m": (0, 12), "x": (12, 4)})], "x has a place in the optimizer"),
        (
            [share(0, 7, {"m": (0, 7)}), share(7, 16, {"m": (0, 5)}, step=6)],
            r"have done \[5, 6\] steps",
        ),
    ],
)
def test_shares_that_contradict_themselves_are_refused(shares: list[Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"contradict each other\n.*{message}"):
        rank_state(SHAPES, shares, WEIGHTS, [])


def test_weights_of_another_shape_than_the_optimizers_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"m is \(3, 4\) and \(4, 3\)"):
        rank_state(SHAPES, [share(0, 16, {})], {"m": MATRIX.view(3, 4)}, [])


def test_zero_3_cuts_every_parameter_by_itself() -> None:
    def of_rank(rank: int) -> Any:
        padded = torch.cat([BIAS, torch.zeros(2)])  # 4 elements over 3 ranks: 2 + 2 + 0
        parts = [MATRIX.view(3, 4)[rank], padded[2 * rank : 2 * rank + 2]]
        flat = torch.cat(parts) if rank < 2 else torch.cat([parts[0], torch.zeros(2)])
        inner = {"state": {0: {"step": 5, "exp_avg": flat - 1}}, "param_groups": []}
        return {"optimizer_state_dict": {"fp32_flat_groups": [flat], "optimizer_state_dict": inner}}

    state = rank_state(SHAPES, [of_rank(rank) for rank in range(3)], {}, [])
    assert torch.equal(values(state.held["m"], "master"), MATRIX)
    assert torch.equal(values(state.held["b"], "exp_avg"), BIAS - 1)
    odd = of_rank(0)
    odd["optimizer_state_dict"]["ds_zero_partition_groups"] = [{"partition_count": 1}]
    with pytest.raises(CheckpointError, match="groups of their own"):
        rank_state(SHAPES, [odd], {}, [])
