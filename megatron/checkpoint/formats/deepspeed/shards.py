"""The state of one model-parallel rank of DeepSpeed, as flat ranges of its parameters by kind.

Kinds are `weight` (in the dtype of training), `master` (fp32) and those of the update rule's state.
Only this module handles the differences between DeepSpeed's optimizers; all are converted to this
form. Ranges are views of mapped files: nothing is read yet.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from megatron.checkpoint.boxes import Box, flat_boxes, overlap, whole
from megatron.errors import CheckpointError

WEIGHT, MASTER = "weight", "master"
_NOT_STATE = ("step",)


class FlatRange(NamedTuple):
    """Elements of a row-major tensor from `start` on, as a one-dimensional view."""

    start: int
    values: Tensor


@dataclass(frozen=True, slots=True)
class RankTensors:
    """One rank's part of one parameter: its local shape, and its ranges by kind."""

    shape: tuple[int, ...]
    kinds: dict[str, list[FlatRange]] = field(default_factory=dict)

    def read_into(self, target: Tensor, kind: str, box: Box, name: str) -> None:
        """Copy the elements `box` of the local tensor into `target`, converting dtypes.

        Raises:
            CheckpointError: the ranges do not hold each of them exactly once.
        """
        copied = 0
        for start, values in self.kinds[kind]:
            at = 0
            for piece in flat_boxes(self.shape, start, start + values.numel()):
                common = overlap(piece, box) if box.shape else piece
                if common is not None:
                    source = values[at : at + piece.size].view(piece.shape)
                    inside = source[common.within(piece).slices]
                    target[common.within(box).slices].copy_(inside)
                    copied += common.size
                at += piece.size
        if copied != box.size:
            raise CheckpointError(
                "the shares of a DeepSpeed checkpoint do not make a tensor up",
                found=f"{name} ({kind}): {copied} of {box.size} elements are there",
                fix="copy the folder again, from every node that wrote to it, or load another one",
            )


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one model-parallel rank, by DeepSpeed's names, and its optimizer's steps."""

    held: dict[str, RankTensors]
    steps: int | None
    scaler: Any  # DeepSpeed's own object or fields; None where there is none


def rank_state(
    model: Mapping[str, Any],
    shares: Sequence[Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    names: Sequence[str],
) -> RankState:
    """Return the state of one model-parallel rank, assembled from its files.

    Args:
        model: its model states; under ZeRO-3 those of any one data-parallel rank.
        shares: its optimizer states, by data-parallel rank; none without ZeRO.
        weights: by DeepSpeed's names; empty under ZeRO-3.
        names: the names of parameters in the order of the optimizer, which files without ZeRO do
            not record; if empty, matrices come before the rest, as Megatron groups them.

    Raises:
        CheckpointError: the parts contradict each other, or are of a kind that is not known.
    """
    held = {name: RankTensors(tuple(t.shape), {WEIGHT: [_flat(t)]}) for name, t in weights.items()}
    if not shares:
        return _unshared(model, held, names)
    shapes = [dict(group) for group in model.get("param_shapes") or ()]
    states = [share["optimizer_state_dict"] for share in shares]
    for group in shapes:
        for name, shape in group.items():
            held.setdefault(name, RankTensors(tuple(shape)))
            if held[name].shape != tuple(shape):
                raise _contradiction(f"{name} is {held[name].shape} and {tuple(shape)}")
    if "fp32_flat_groups" in states[0]:
        steps = _partitioned(states, shapes, held)
    else:
        steps = _sliced(states, held)
    return RankState(held, steps, states[0].get("loss_scaler"))


def shape_of_shares(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the local shapes by name that a model state lists for ZeRO; empty without ZeRO."""
    groups = state.get("param_shapes") or ()
    return {name: tuple(shape) for group in groups for name, shape in group.items()}


def _flat(tensor: Tensor) -> FlatRange:
    return FlatRange(0, tensor.detach().reshape(-1))


def _sliced(states: Sequence[Mapping[str, Any]], held: dict[str, RankTensors]) -> int | None:
    """Read ZeRO 1 and 2: a group is one flat tensor, cut evenly; offsets are stored beside it.

    A parameter may continue from the share of one rank to that of the next.
    """
    counts: set[int] = set()
    done: dict[tuple[str, str], int] = defaultdict(int)
    for state in states:
        base = state["base_optimizer_state"]
        for group, slices in enumerate(state["param_slice_mappings"]):
            flat = {MASTER: state["single_partition_of_fp32_groups"][group]}
            flat |= _moments(_state_of(base, group), counts)
            for name, where in slices.items():
                at = vars(where)
                for kind, values in flat.items():
                    part = values.view(-1)[at["start"] : at["start"] + at["numel"]]
                    _add(held, name, kind, done, part)
    return _one_count(counts)


def _partitioned(
    states: Sequence[Mapping[str, Any]],
    shapes: Sequence[Mapping[str, Any]],
    held: dict[str, RankTensors],
) -> int | None:
    """Read ZeRO-3: every parameter is cut evenly by itself, the last share padded."""
    counts: set[int] = set()
    if any(state.get("ds_zero_partition_groups") for state in states):
        raise CheckpointError(
            "the DeepSpeed checkpoint shares parameters out over groups of their own",
            found="ds_zero_partition_groups, which ZeRO-3 writes for experts",
            fix="load a checkpoint of a model without experts",
        )
    done: dict[tuple[str, str], int] = defaultdict(int)
    for rank, state in enumerate(states):
        base = state["optimizer_state_dict"]
        for group, members in enumerate(shapes):
            flat = {MASTER: state["fp32_flat_groups"][group]}
            flat |= _moments(_state_of(base, group), counts)
            at = 0
            for name, shape in members.items():
                size = math.prod(shape)
                share = math.ceil(size / len(states))
                count = max(0, min(share, size - rank * share))
                for kind, values in flat.items():
                    _add(held, name, kind, done, values.view(-1)[at : at + count])
                at += share
    return _one_count(counts)


def _unshared(
    model: Mapping[str, Any], held: dict[str, RankTensors], names: Sequence[str]
) -> RankState:
    """Read a state without ZeRO: torch's state dict, parameters numbered through the groups."""
    state = model.get("optimizer")
    if state is None:
        return RankState(held, None, None)
    base = state.get("optimizer_state_dict", state)
    masters = list(itertools.chain.from_iterable(state.get("fp32_groups", ())))
    names = names or _order_by_groups(held)
    if "fp32_groups_flat" in state:
        return _unshared_flat(state, held, names)
    numbers = [n for group in base["param_groups"] for n in group["params"]]
    if len(numbers) != len(names):
        raise _contradiction(f"{len(numbers)} parameters in the optimizer, {len(names)} named")
    counts: set[int] = set()
    for at, (number, name) in enumerate(zip(numbers, names)):
        kinds = _moments(_state_of(base, number), counts)
        if masters:
            kinds[MASTER] = masters[at]
        for kind, values in kinds.items():
            # A tied copy has no weights, so it is not in `held` yet.
            tensors = held.setdefault(name, RankTensors(tuple(values.shape)))
            if tuple(values.shape) != tensors.shape:
                raise _contradiction(f"{name} is {tensors.shape}, its {kind} {tuple(values.shape)}")
            tensors.kinds[kind] = [_flat(values)]
    return RankState(held, _one_count(counts), state if "cur_scale" in state else None)


def _order_by_groups(held: Mapping[str, RankTensors]) -> list[str]:
    decayed = [n for n, h in held.items() if len(h.shape) > 1 and not n.endswith(".bias")]
    return decayed + [name for name in held if name not in set(decayed)]


def _unshared_flat(
    state: Mapping[str, Any], held: dict[str, RankTensors], names: Sequence[str]
) -> RankState:
    """Return the state of a rank whose groups are one flat tensor each: fp16, fused optimizer."""
    counts: set[int] = set()
    left = iter(names)
    for group, master in enumerate(state["fp32_groups_flat"]):
        moments = _moments(_state_of(state["optimizer_state_dict"], group), counts)
        flat = {MASTER: master, **moments}
        at = 0
        while at < master.numel():
            name = next(left, None)
            if name is None:
                raise _contradiction("the optimizer holds more elements than the parameters")
            size = math.prod(held[name].shape)
            for kind, values in flat.items():
                held[name].kinds[kind] = [FlatRange(0, values.detach().view(-1)[at : at + size])]
            at += size
    return RankState(held, _one_count(counts), state if "cur_scale" in state else None)


def _state_of(base: Any, number: int) -> Mapping[str, Any]:
    """Return the state of one (flat) parameter; elastic files keep a bare list."""
    if isinstance(base, Mapping):
        fields: Mapping[str, Any] = base.get("state", {}).get(number, {})
        group = base.get("param_groups", ())
        step = group[0].get("step") if group and "step" not in fields else None
        return fields if step is None else {**fields, "step": step}
    listed: Mapping[str, Any] = base[number]
    return listed


def _moments(state: Mapping[str, Any], counts: set[int]) -> dict[str, Tensor]:
    """Return the tensors of an update rule; its number of steps goes into `counts`."""
    if "step" in state:
        counts.add(int(state["step"]))
    return {
        kind: value
        for kind, value in state.items()
        if kind not in _NOT_STATE and isinstance(value, Tensor)
    }


def _add(
    held: dict[str, RankTensors],
    name: str,
    kind: str,
    done: dict[tuple[str, str], int],
    values: Tensor,
) -> None:
    if name not in held:
        raise _contradiction(f"{name} has a place in the optimizer, and no shape")
    held[name].kinds.setdefault(kind, []).append(FlatRange(done[name, kind], values.detach()))
    done[name, kind] += values.numel()
    if done[name, kind] > math.prod(held[name].shape):
        raise _contradiction(f"the shares hold more than {name} {held[name].shape} has ({kind})")


def _one_count(counts: set[int]) -> int | None:
    if len(counts) > 1:
        raise _contradiction(f"parts of the optimizer have done {sorted(counts)} steps")
    return next(iter(counts), None)


def _contradiction(found: str) -> CheckpointError:
    return CheckpointError(
        "the files of a DeepSpeed checkpoint contradict each other",
        found=found,
        fix="the folder holds parts of two saves or is damaged: load another checkpoint",
    )


def missing_elements(held: RankTensors, kind: str) -> int:
    """Return how many elements of the local tensor the ranges of `kind` leave out."""
    return whole(held.shape).size - sum(r.values.numel() for r in held.kinds.get(kind, ()))
