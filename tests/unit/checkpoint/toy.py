"""A toy model's tensors at any (tp, dp) layout: every way of cutting that a real model has."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.sharded import GeneratorStates, Placement, ShardedTensor, Snapshot
from megatron.mpu.partition import Partition, local_slice

VOCABULARY = 13  # padded to a multiple of 2 tp, so each tp has another padding
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))


class Weight(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    partition: Partition | None
    true_rows: int | None = None


WEIGHTS = {
    "embedding.word": Weight((VOCABULARY, 6), torch.bfloat16, Partition(dim=0), VOCABULARY),
    "qkv.weight": Weight((12, 6), torch.bfloat16, Partition(dim=0)),
    "fc1.weight": Weight((16, 6), torch.float32, Partition(dim=0, blocks=2)),
    "dense.weight": Weight((6, 8), torch.float16, Partition(dim=1)),
    "norm.weight": Weight((6,), torch.float32, None),
    "temperature": Weight((), torch.float64, None),
}


class Rank(NamedTuple):
    """One rank's memory: the tensors as a model holds them, and their description."""

    memory: dict[str, Tensor]
    tensors: tuple[ShardedTensor, ...]


def rank_at(tp: int, dp: int, rank: int, *, seed: int | None = 0) -> Rank:
    """Rank `rank` of the grid with tp fastest; `seed` None fills its memory with rubbish."""
    dp_index, tp_index = divmod(rank, tp)
    memory: dict[str, Tensor] = {}
    tensors = []
    for name, weight in WEIGHTS.items():
        placement = Placement(weight.partition, tp_index, tp, weight.true_rows)
        local = _local(name, weight, placement, weight.dtype, seed)
        tensors.append(ShardedTensor.of(f"model/{name}", local, placement))
        memory[f"model/{name}"] = local
        moment = _local(f"{name}.exp_avg", weight, placement, torch.float32, seed).reshape(-1)
        start, stop = (moment.numel() * i // dp for i in (dp_index, dp_index + 1))
        share = moment[start:stop].clone()
        key = f"optimizer/exp_avg/{name}"
        memory[key] = share
        tensors.append(
            ShardedTensor.of_range(
                key, share, start=start, local_shape=local.shape, placement=placement
            )
        )
    return Rank(memory, tuple(tensors))


def snapshot_at(tp: int, dp: int, rank: int, *, seed: int = 0, iteration: int = 100) -> Snapshot:
    states = GeneratorStates({"cpu": torch.full((5,), rank, dtype=torch.uint8)}, {"rank": rank})
    return Snapshot(
        tensors=rank_at(tp, dp, rank, seed=seed).tensors,
        progress={"iteration": iteration, "consumed_samples": 8 * iteration},
        config={"model": {"hidden_size": 6}},
        scalars={"loss_scale": 4096.0},
        generators=states,
    )


def differences(found: Rank, expected: Rank) -> list[str]:
    """Names of tensors whose bytes differ."""
    return [
        name
        for name, tensor in expected.memory.items()
        if not torch.equal(
            found.memory[name].reshape(-1).view(torch.uint8),
            tensor.reshape(-1).view(torch.uint8),
        )
    ]


def _local(
    name: str, weight: Weight, placement: Placement, dtype: torch.dtype, seed: int | None
) -> Tensor:
    shape = list(weight.shape)
    if weight.true_rows is not None:
        multiple = 2 * placement.size
        shape[0] = -(-shape[0] // multiple) * multiple
    full = torch.zeros(shape, dtype=dtype)
    if seed is None:
        full.fill_(float("nan"))
    else:
        generator = torch.Generator().manual_seed(seed * 1000 + sum(name.encode()))
        values = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(dtype)
        (full if full.dim() == 0 else full[: weight.shape[0]]).copy_(values)
    return local_slice(full, placement.partition, placement.index, placement.size).clone()
