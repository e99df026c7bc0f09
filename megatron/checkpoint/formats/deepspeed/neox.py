"""What is gpt-neox's own in a DeepSpeed folder: its config, names, row orders and split biases.

The config that a run was started with lies in `configs/` beside the files. gpt-neox splits tensors
over tensor-parallel ranks as Megatron does, but orders rows in ways of its own, and lets every rank
add a bias where branches are parallel: the bias of the model is the sum of theirs.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.formats.megatron.names import BLOCK, RowOrder
from megatron.config.data import DataConfig
from megatron.config.fields import field_names
from megatron.config.model import ModelConfig
from megatron.config.neox.mapping import read_neox
from megatron.errors import CheckpointError

CONFIGS = "configs"
_SUFFIXES = (".yml", ".yaml", ".json")
_NUMBERED = re.compile(r"(?:module\.)?(?:sequential\.)?(\d+)\.(.+)")
_TIED = re.compile(r"(?:module\.)?tied_modules\.embed\.(.+)")
_LINEARS: Mapping[str, str] = {"mlp.linear1": "mlp.fc1", "mlp.linear2": "mlp.fc2"}
_EDGES: Mapping[str, str] = {
    "word_embeddings.weight": "embedding.word.weight",
    "position_embeddings.weight": "embedding.position.weight",
    "norm.weight": "final_norm.weight",
    "norm.bias": "final_norm.bias",
    "final_linear.weight": "output.weight",
}
_SUMMED = (".attention.output.bias", ".mlp.fc2.bias")


def is_neox(state: Mapping[str, Any]) -> bool:
    """Return whether the state of the first rank is gpt-neox's: `args` are few, and a mapping."""
    args = state.get("args")
    return isinstance(args, Mapping) and "model_parallel_size" in args


def config_groups(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the fields of our config groups (plain values) that the folder's configs define.

    Raises:
        CheckpointError: there are none, or they ask for what this program does not have.
    """
    folder = directory / CONFIGS
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    paths = [path for path in paths if path.suffix in _SUFFIXES]
    if not paths:
        raise CheckpointError(
            "a checkpoint of gpt-neox lacks the config of its run",
            found=f"no .yml or .json in {folder}",
            fix=f"copy the folder whole, or put the config of the run into {folder}",
        )
    config = read_neox([str(path) for path in paths], world_size=None)
    if config.problems:
        first = config.problems[0]
        raise CheckpointError(
            "the config of a gpt-neox checkpoint is not one that this program understands",
            found=f"{folder}: {first.problem}; {first.found}",
            fix=str(first.fix),
        )
    return {
        group: {name: config.values[name] for name in names if name in config.values}
        for group, names in (
            ("model", field_names(ModelConfig)),
            ("data", tuple(name for name in field_names(DataConfig) if name == "seq_length")),
        )
    }


def first_neox_block(names: Iterable[str]) -> int:
    """Return the index of block 0 in gpt-neox's list of layers, which also has functions."""
    found = [_NUMBERED.fullmatch(name) for name in names]
    return min((int(match[1]) for match in found if match and _in_block(match[2])), default=0)


def neox_to_ours(name: str, first: int) -> str | None:
    """Return our name of gpt-neox's parameter; None for one that it does not have.

    Args:
        first: the index of block 0 in its list of layers.
    """
    if match := _TIED.fullmatch(name):
        return _EDGES.get(match[1])
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return None
    inside = _in_block(match[2])
    if inside is not None:
        return f"layers.{int(match[1]) - first}.{inside}"
    return _EDGES.get(re.sub(r"\.scale$", ".weight", match[2]))


def _in_block(name: str) -> str | None:
    module, _, leaf = name.rpartition(".")
    leaf = "weight" if leaf == "scale" else leaf  # of an RMSNorm
    if module in _LINEARS:
        return f"{_LINEARS[module]}.{leaf}"
    return BLOCK.get(f"{module}.{leaf}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NeoxRows(RowOrder):
    """The order in which gpt-neox keeps the rows of a matrix of several parts.

    `queries_per_group`: above 1 a rank's rows are all queries, all keys, all values; else those of
    a head are adjacent, as ours. `is_gated`: a rank's rows are up, then gate. `sums_biases`: output
    biases of tensor-parallel ranks are added up.
    """

    queries_per_group: int = 1
    is_gated: bool = False
    sums_biases: bool = False

    def moves(self, name: str) -> bool:
        """Return whether the rows of the parameter `name` are in another order than ours."""
        return (self.queries_per_group > 1 and ".attention.qkv." in name) or (
            self.is_gated and ".mlp.fc1." in name
        )

    def to_ours(self, name: str, local: Tensor) -> Tensor:
        """Return one tp rank's part of `name` with rows in our order; a view if it is the same."""
        if not self.moves(name):
            return local
        if ".mlp.fc1." in name:
            up, gate = local.chunk(2)
            return torch.cat([gate, up])
        rest, each = local.shape[1:], self.queries_per_group
        groups = len(local) // self.head_width // (each + 2)
        ends = [groups * each * self.head_width, groups * (each + 1) * self.head_width]
        parts = [part.reshape(groups, -1, *rest) for part in local.tensor_split(ends)]
        return torch.cat(parts, dim=1).reshape(local.shape)

    def sums(self, name: str) -> bool:
        """Return whether the parameter `name` is the sum of those of all tp ranks."""
        return self.sums_biases and name.endswith(_SUMMED)


def neox_row_order(config: Mapping[str, Mapping[str, Any]]) -> NeoxRows:
    """Return the row order in files of a model with these config groups (plain values)."""
    model = config["model"]
    heads = int(model["num_attention_heads"])
    return NeoxRows(
        head_width=int(model["hidden_size"]) // heads,
        queries_per_group=heads // int(model.get("num_query_groups") or heads),
        is_gated=model.get("glu_activation") is not None,
        sums_biases=bool(model.get("use_parallel_residual")),
    )
