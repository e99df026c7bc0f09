"""The files of one Megatron checkpoint: which ranks wrote them, and their content by name.

    iter_0000100/mp_rank_TT/model_optim_rng.pt         tensor rank TT, one pipeline stage
    iter_0000100/mp_rank_TT_PPP/model_optim_rng.pt     pipeline stage PPP
    release/mp_rank_.../model_optim_rng.pt             weights to start from

Each holds its rank's parts. Optimizer state has no names in them: it is numbered by parameter, in
the order of the modules, weights with decay first.
"""

import argparse
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.files import unpickle
from megatron.checkpoint.formats.megatron import distributed_optimizer, facts
from megatron.checkpoint.formats.megatron.distributed_optimizer import BufferParameter
from megatron.checkpoint.formats.megatron.names import is_beside_language_model, is_parameter
from megatron.errors import CheckpointError

NAMES = ("model_optim_rng.pt", "model_rng.pt")  # the latter beside a file of the optimizer alone
HEAD_COPY = "word_embeddings_for_head.weight"
SHARDED_OPTIMIZERS = (distributed_optimizer.FILE, "optim.pt")
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
_CHUNK = re.compile(r"model(\d*)")
_PREFIXES = ("module.", "model.", "language_model.")
_SHARED = ("embedding.word_embeddings.weight", "output_layer.weight")
_KINDS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class Key(NamedTuple):
    """A parameter of one rank: the virtual stage it is in, and Megatron's dotted name."""

    chunk: int
    name: str


class OptimizerShard(NamedTuple):
    """The optimizer's state of one rank: tensors by kind and parameter, updates, loss scale."""

    tensors: Mapping[str, Mapping[Key, Tensor]]
    steps: int
    scaler: Mapping[str, Any]


class RankFile:
    """The file that one rank of a Megatron job wrote."""

    def __init__(self, path: Path, stage: int = 0) -> None:
        self.path = path
        self.stage = stage
        content = unpickle.load(path)
        if not isinstance(content, dict) or not any(map(_is_chunk, content)):
            raise self.error("no model in it", "give a checkpoint of Megatron-LM's own format")
        self.content: Mapping[str, Any] = content

    @property
    def args(self) -> Mapping[str, Any]:
        """The flags of the run, flat; empty where a tool wrote the file without them."""
        args = self.content.get("args")
        return vars(args) if isinstance(args, argparse.Namespace) else {}

    @cached_property
    def parameters(self) -> dict[Key, Tensor]:
        """This rank's parts of parameters, in the order of the modules."""
        found = {}
        nested = False  # Megatron core keeps heads beside the rest, in the order of its modules
        chunks = sorted(name for name in self.content if _is_chunk(name))
        for name in chunks:
            chunk = int(name.removeprefix("model") or 0)
            for dotted, value in _flat(self.content[name], ""):
                nested = nested or "language_model." in dotted
                if isinstance(value, Tensor) and is_parameter(dotted):
                    found[Key(chunk, _bare(dotted))] = value
        if not nested:
            return found
        heads_last = sorted(found, key=lambda key: (key.chunk, is_beside_language_model(key.name)))
        return {key: found[key] for key in heads_last}

    @cached_property
    def optimizer(self) -> OptimizerShard | None:
        """The optimizer's state; None if the file has none, or a part of another rank's.

        Raises:
            CheckpointError: it is not of the parameters that are in the file.
        """
        state = self.content.get("optimizer")
        if not isinstance(state, Mapping):
            return None
        inner = state.get("optimizer", state)
        if not isinstance(inner, Mapping):
            return None
        if not inner.get("state"):
            return self._distributed(state, inner)
        groups = inner["param_groups"]
        keys = self._keys_of_groups(groups, inner["state"])
        tensors: dict[str, dict[Key, Tensor]] = {kind: {} for kind in _KINDS}
        for group, names in zip(groups, keys):
            for number, key in zip(group["params"], names):
                for kind, tensor in inner["state"][number].items():
                    if kind in tensors and isinstance(tensor, Tensor):
                        tensors[kind][key] = tensor
        masters = state.get("fp32_from_fp16_params")
        if masters is not None:
            pairs = zip(itertools.chain(*masters), itertools.chain(*keys), strict=True)
            tensors["master"] = {key: master for master, key in pairs}
        tensors = {kind: named for kind, named in tensors.items() if named}
        return OptimizerShard(
            tensors, self._steps(groups, inner["state"]), facts.loss_scaler(state)
        )

    def _distributed(
        self, state: Mapping[str, Any], inner: Mapping[str, Any]
    ) -> OptimizerShard | None:
        """Return the state in the file of the distributed optimizer; None without one we read."""
        path = self.path.parent / distributed_optimizer.FILE
        if not path.is_file():
            return None
        buffers = distributed_optimizer.read(path)
        if buffers is None:
            return None
        chunks = list(dict.fromkeys(key.chunk for key in self.parameters))
        dtypes = {value.dtype for value in self.parameters.values()}
        if len(buffers) != len(chunks) or len(dtypes) != 1:
            raise self.error(
                f"{path.name} has {len(buffers)} buffers, for {len(chunks)} models of "
                f"{len(dtypes)} types",
                "load the weights alone (--finetune)",
            )
        tensors: dict[str, dict[Key, Tensor]] = {}
        elements = sum(value.numel() for value in self.parameters.values())
        for chunk, flat in zip(chunks, buffers):
            parameters = {
                key: BufferParameter(tuple(value.shape), self._is_shared(key))
                for key, value in self.parameters.items()
                if key.chunk == chunk
            }
            size = distributed_optimizer.bucket_size(
                self.args, stage=self.stage, chunk=chunk, elements=elements
            )
            found = distributed_optimizer.views(path, flat, parameters, size)
            for kind, named in found.items():
                tensors.setdefault(kind, {}).update(named)
        if dtypes == {torch.float32}:
            tensors.pop("master", None)  # the weights themselves
        steps = self._steps(inner.get("param_groups", ()), {0: dict.fromkeys(tensors)})
        return OptimizerShard(tensors, steps, facts.loss_scaler(state))

    def _is_shared(self, key: Key) -> bool:
        """Return whether a parameter is an embedding that the first and the last stage have."""
        stages = int(self.args.get("pipeline_model_parallel_size") or 1)
        if stages == 1 or self.args.get("untie_embeddings_and_output_weights"):
            return False
        return key.name in (HEAD_COPY, *_SHARED)

    def error(self, found: str, fix: str) -> CheckpointError:
        """Return an error that this file is not what a Megatron checkpoint should be."""
        return CheckpointError(
            "a file of a Megatron checkpoint does not hold what it should",
            found=f"{self.path}: {found}",
            fix=fix,
        )

    def _keys_of_groups(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]
    ) -> list[list[Key]]:
        """Return the parameters of each group by number, checked against the state's shapes."""
        decayed = [key for key, value in self.parameters.items() if value.dim() > 1]
        undecayed = [key for key, value in self.parameters.items() if value.dim() <= 1]
        wanted = [names for names in (decayed, undecayed) if names]
        for order in itertools.permutations(wanted):
            if self._fits(groups, order, state):
                return [list(names) for names in order]
        sizes = [len(group["params"]) for group in groups]
        raise self.error(
            f"optimizer state for groups of {sizes} parameters, whose shapes are not those of the "
            f"{len(decayed)} matrices and {len(undecayed)} vectors of the model",
            "load the weights alone (--finetune), or convert it with the program that wrote it",
        )

    def _fits(
        self,
        groups: Sequence[Mapping[str, Any]],
        order: Sequence[Sequence[Key]],
        state: Mapping[Any, Any],
    ) -> bool:
        if [len(group["params"]) for group in groups] != [len(names) for names in order]:
            return False
        return all(
            tensor.shape == self.parameters[key].shape
            for group, names in zip(groups, order)
            for number, key in zip(group["params"], names)
            for kind, tensor in state[number].items()
            if kind in _KINDS and isinstance(tensor, Tensor)
        )

    def _steps(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> int:
        counts = [group["step"] for group in groups if "step" in group]
        counts += [values["step"] for values in state.values() if "step" in values]
        if counts:
            return int(counts[0])
        if not any(kind in _KINDS[:2] for values in state.values() for kind in values):
            return int(self.content.get("iteration", 0))  # SGD counts nothing
        raise self.error(
            "optimizer state without the number of updates",
            "load the weights alone (--finetune)",
        )


class MegatronFiles:
    """All files of one checkpoint, by tensor and pipeline rank; opened when they are needed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.paths = _find(directory)
        self.tp = 1 + max(tp for tp, _ in self.paths)
        self.pp = 1 + max(pp for _, pp in self.paths)
        missing = [
            f"tensor rank {tp} of stage {pp}"
            for pp in range(self.pp)
            for tp in range(self.tp)
            if (tp, pp) not in self.paths
        ]
        if missing:
            raise CheckpointError(
                "a Megatron checkpoint lacks files of some ranks",
                found=f"{directory}: none of {', '.join(missing[:4])}"
                + (" ..." if len(missing) > 4 else ""),
                fix="copy the checkpoint whole",
            )
        self._open: dict[tuple[int, int], RankFile] = {}

    @property
    def all_paths(self) -> list[Path]:
        """The files of all ranks, with those of the distributed optimizer."""
        beside = [path.parent / distributed_optimizer.FILE for path in self.paths.values()]
        return [*self.paths.values(), *(path for path in beside if path.is_file())]

    def rank(self, tp: int, pp: int) -> RankFile:
        """Return the file of one rank.

        Files that cannot be mapped are kept in memory for one pipeline stage at a time.
        """
        if (tp, pp) not in self._open:
            path = self.paths[tp, pp]
            if not unpickle.is_mapped(path):
                self._open = {at: file for at, file in self._open.items() if at[1] == pp}
            opened = RankFile(path, pp)
            self._check_same_save(opened)
            self._open[tp, pp] = opened
        return self._open[tp, pp]

    def close(self) -> None:
        """Release everything that is mapped or read."""
        self._open.clear()

    def _check_same_save(self, opened: RankFile) -> None:
        for other in self._open.values():
            for name in ("iteration", "checkpoint_version"):
                value, other_value = opened.content.get(name), other.content.get(name)
                if value != other_value:
                    raise opened.error(
                        f"{name} {value}, but {other_value} in {other.path}",
                        "copy the checkpoint whole, from one save",
                    )


def is_megatron(directory: Path) -> bool:
    """Return whether a folder holds files of ranks as Megatron names them."""
    return any(
        _RANK.fullmatch(entry.name) and any((entry / name).is_file() for name in NAMES)
        for entry in directory.iterdir()
        if entry.is_dir()
    )


def _find(directory: Path) -> dict[tuple[int, int], Path]:
    paths = {}
    for entry in sorted(directory.iterdir()):
        match = _RANK.fullmatch(entry.name)
        if match is None:
            continue
        if match[3]:
            raise CheckpointError(
                "the checkpoint is of a Megatron model with experts, which is not read",
                found=str(entry),
                fix="use the program that trained it",
            )
        for name in NAMES:
            if (entry / name).is_file():
                paths[int(match[1]), int(match[2] or 0)] = entry / name
                break
    return paths


def _is_chunk(name: object) -> bool:
    return isinstance(name, str) and _CHUNK.fullmatch(name) is not None


def _flat(state: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Return values by dotted names: Megatron nests some modules and writes dots for others."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _bare(dotted: str) -> str:
    while prefix := next((one for one in _PREFIXES if dotted.startswith(one)), None):
        dotted = dotted.removeprefix(prefix)
    return dotted
