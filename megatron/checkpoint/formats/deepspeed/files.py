"""The files of a `global_stepN` folder by rank, and how they are opened.

Ranks are numbers: sorted as text, rank 10 would come before rank 2.
"""

# mp_rank_XX_model_states.pt                          weights, or nothing of them in a pipeline
# layer_LL-model_TT-model_states.pt                   the weights of a pipeline's layer
# [bf16_]zero_pp_rank_D_mp_rank_XX_optim_states.pt    ZeRO: one share of masters and moments
# zero_pp_rank_D_mp_rank_XX_model_states.pt           ZeRO-3: shapes only
#
# XX = pipeline stage * tensor-parallel size + tensor-parallel rank; D is the data-parallel rank.

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoint.files import unpickle
from megatron.checkpoint.files.unpickle import Inert, enum_of
from megatron.errors import CheckpointError

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL_OF_SHARE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_SHARE = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_.*|expp_rank_\d+_.*")
_DIMENSIONS = "checkpoint_parallel_dimensions"

# Classes that DeepSpeed pickles beside tensors and plain values, as inert objects.
_STAND_INS: Mapping[str, Any] = {
    "deepspeed.utils.tensor_fragment.fragment_address": Inert,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Inert,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Inert,
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape": Inert,
    "deepspeed.runtime.zero.config.ZeroStageEnum": enum_of("ZeroStageEnum"),
}


def load(path: Path) -> Any:
    """Return the content of a DeepSpeed file, tensors mapped, without running its code."""
    return unpickle.load(path, also=_STAND_INS)


class DeepSpeedFolder(NamedTuple):
    """The files of one folder by rank; nothing is opened yet."""

    directory: Path
    model: Mapping[int, Path]  # by model-parallel rank
    model_of_share: Mapping[tuple[int, int], Path]  # by (model-parallel, data-parallel) rank
    shares: Mapping[tuple[int, int], Path]
    layers: Mapping[tuple[int, int], Path]  # by (layer, tensor-parallel rank)

    @classmethod
    def of(cls, directory: Path) -> "DeepSpeedFolder":
        """Sort the files of `directory` by their names.

        Raises:
            CheckpointError: it holds experts, or shares of two precisions.
        """
        folder = cls(directory, {}, {}, {}, {})
        precisions = set()
        for path in sorted(directory.iterdir()):
            name = path.name
            if match := _MODEL.fullmatch(name):
                folder.model[int(match[1])] = path  # type: ignore[index]  # ours until returned
            elif match := _MODEL_OF_SHARE.fullmatch(name):
                folder.model_of_share[int(match[2]), int(match[1])] = path  # type: ignore[index]
            elif match := _SHARE.fullmatch(name):
                precisions.add(match[1])
                folder.shares[int(match[3]), int(match[2])] = path  # type: ignore[index]
            elif match := _LAYER.fullmatch(name):
                folder.layers[int(match[1]), int(match[2] or 0)] = path  # type: ignore[index]
            elif _EXPERT.fullmatch(name):
                raise CheckpointError(
                    "the DeepSpeed checkpoint holds experts, which this program does not read",
                    found=str(path),
                    fix="load a checkpoint of a model without experts",
                )
        if len(precisions) > 1:
            raise CheckpointError(
                "the DeepSpeed checkpoint has optimizer files of two precisions",
                found=f"names with and without {max(map(str, precisions))!r} in {directory}",
                fix="remove those of the run that was not the last to save there",
            )
        return folder

    @property
    def partitioned(self) -> bool:
        """Whether the weights are partitioned over the replicas too (ZeRO-3)."""
        return bool(self.model_of_share)

    @property
    def files(self) -> list[Path]:
        """Every file that is read."""
        groups = (self.model, self.model_of_share, self.shares, self.layers)
        return [path for group in groups for path in group.values()]


def recognise(directory: Path) -> bool:
    """Return whether `directory` is a DeepSpeed checkpoint, but not of the universal layout."""
    if (directory / "zero").is_dir():
        return False
    return any(
        _MODEL.fullmatch(name) or _MODEL_OF_SHARE.fullmatch(name)
        for name in (entry.name for entry in directory.iterdir())
    )


class FolderGrid(NamedTuple):
    """The grid of ranks that wrote a folder; `dp` is 1 where nothing is partitioned over it."""

    tp: int
    pp: int
    dp: int

    def ranks(self) -> Iterator[tuple[int, int, int]]:
        """Yield (stage, tensor-parallel rank, model-parallel rank), stage by stage."""
        for stage in range(self.pp):
            for tp in range(self.tp):
                yield stage, tp, stage * self.tp + tp


def grid_of(
    folder: DeepSpeedFolder, state: Mapping[str, Any], known: tuple[int, int] | None
) -> FolderGrid:
    """Return the grid of ranks, after a check that all of its files exist.

    Args:
        state: of the first model-parallel rank.
        known: (tp, pp) from a record of ours, used where DeepSpeed records nothing.

    Raises:
        CheckpointError: files are missing, or the grid is unknown.
    """
    count = len({rank for rank, _ in folder.model_of_share} | set(folder.model))
    dimensions = state.get(_DIMENSIONS)
    tps = len({tp for _, tp in folder.layers})
    if known is not None:
        tp, pp = known
    elif isinstance(dimensions, Mapping):
        tp, pp = int(dimensions["tp_degree"]), int(dimensions["pp_degree"])
    elif tps:
        tp, pp = tps, count // tps
    else:
        tp, pp = count, 1
    dp = int(state.get("dp_world_size") or 1)
    grid = FolderGrid(tp, pp, dp)
    wanted = [rank for _, _, rank in grid.ranks()]
    missing = []
    if folder.partitioned:
        names = "zero_pp_rank_{1}_mp_rank_{0:02d}_model_states.pt"
        missing += _missing(wanted, dp, folder.model_of_share, names)
    else:
        missing += [f"mp_rank_{r:02d}_model_states.pt" for r in wanted if r not in folder.model]
    if folder.shares or folder.partitioned:
        names = "zero_pp_rank_{1}_mp_rank_{0:02d}_optim_states.pt"
        missing += _missing(wanted, dp, folder.shares, names)
    for layer in {layer for layer, _ in folder.layers}:
        missing += [
            f"layer_{layer:02d}-model_{r:02d}-model_states.pt"
            for r in range(tp)
            if (layer, r) not in folder.layers
        ]
    if missing or count != tp * pp:
        raise CheckpointError(
            "a DeepSpeed checkpoint is not complete",
            found=f"{folder.directory}: tp={tp} pp={pp} dp={dp}, {count} model-parallel ranks; "
            f"missing {', '.join(missing[:4]) or 'nothing'}"
            + (f" and {len(missing) - 4} more" if len(missing) > 4 else ""),
            fix="copy the folder again, from every node that wrote to it, or load another one",
        )
    return grid


def _missing(
    wanted: list[int], dp: int, there: Mapping[tuple[int, int], Path], name: str
) -> list[str]:
    pairs = [(rank, share) for rank in wanted for share in range(dp)]
    return [name.format(*pair) for pair in pairs if pair not in there]
