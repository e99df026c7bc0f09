"""Lets DeepSpeed's engine save in its own layout, with nothing in it that only we can read.

Names and splits of parameters, and what our optimizer keeps at stage 0, are handed over in plain
values. How the files become a checkpoint is `checkpoint.formats.deepspeed.save`'s business.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.checkpoint.formats.deepspeed.parameters import KnownParameter, describe_parameter
from megatron.checkpoint.formats.deepspeed.save import ClientState, DurableWriter, Live
from megatron.config.precision import PrecisionConfig
from megatron.engine.deepspeed.interface import CheckpointWriter, DeepSpeedRuntime
from megatron.mpu.context import ParallelContext
from megatron.optimizer.optimizer import MegatronOptimizer, read_scalars
from megatron.optimizer.param_groups import ParamGroup

_TIED = "tied_modules."

Named = Sequence[tuple[str, Parameter]]


class LossScale(NamedTuple):
    """The factor on the loss, and the state of its schedule (empty if constant)."""

    scale: float
    state: Mapping[str, float]


def live_run(
    runtime: DeepSpeedRuntime,
    groups: Sequence[ParamGroup],
    context: ParallelContext,
    *,
    precision: PrecisionConfig,
    loss_scale: LossScale,
    own: MegatronOptimizer | None,
) -> Live:
    """Return what `save_deepspeed` needs of a run.

    Args:
        runtime: DeepSpeed's engine.
        groups: the parameters of this rank under our names, as DeepSpeed's optimizer has them.
        own: our optimizer, where it steps instead of DeepSpeed's (stage 0).
    """
    ordered = [pair for group in groups for pair in group.parameters]
    deepspeed_names = {parameter: name for name, parameter in runtime.module.named_parameters()}
    described = {
        deepspeed_names[p]: _describe(name, p, deepspeed_names[p], context) for name, p in ordered
    }

    def write(folder: Path, tag: str, state: ClientState, writer: DurableWriter) -> None:
        if own is not None:
            state = {**state, "optimizer": _as_deepspeed_keeps_it(own, groups, loss_scale)}
        with _through(runtime, writer), _plain_scale(runtime.optimizer, loss_scale, precision):
            runtime.save_checkpoint(str(folder), tag=tag, client_state=state, save_latest=False)

    return Live(described, tuple(deepspeed_names[p] for _, p in ordered), write)


def _describe(
    name: str, parameter: Parameter, deepspeed_name: str, context: ParallelContext
) -> KnownParameter:
    return describe_parameter(
        name,
        parameter,
        _shape(parameter),
        tp=context.tp.size,
        tied=deepspeed_name.startswith(_TIED),
    )


def _shape(parameter: Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


@contextmanager
def _through(runtime: DeepSpeedRuntime, writer: DurableWriter) -> Iterator[None]:
    """Write every file of DeepSpeed through `writer`."""
    before = runtime.checkpoint_engine
    runtime.checkpoint_engine = _Writer(before, writer)
    try:
        yield
    finally:
        runtime.checkpoint_engine = before


class _Writer:
    """The interface of DeepSpeed's checkpoint engine, writing through our writer."""

    def __init__(self, replaced: CheckpointWriter, writer: DurableWriter) -> None:
        self._replaced, self._writer = replaced, writer

    def __getattr__(self, name: str) -> object:
        return getattr(self._replaced, name)

    def save(self, state_dict: object, path: str) -> None:
        """Write one file, durably; an error is kept until all ranks are done."""
        self._writer.save(state_dict, path)


@contextmanager
def _plain_scale(
    optimizer: Any, loss_scale: LossScale, precision: PrecisionConfig
) -> Iterator[None]:
    """Replace DeepSpeed's loss scale by one of its own classes while its object is pickled."""
    if not hasattr(optimizer, "loss_scaler"):
        yield
        return
    before = optimizer.loss_scaler
    optimizer.loss_scaler = _deepspeed_scale(loss_scale, precision)
    try:
        yield
    finally:
        optimizer.loss_scaler = before


def _deepspeed_scale(loss_scale: LossScale, precision: PrecisionConfig) -> object:
    scales: ModuleType = importlib.import_module("deepspeed.runtime.fp16.loss_scaler")
    scale, state = loss_scale
    if not state:
        return scales.LossScaler(scale=scale)
    made = scales.DynamicLossScaler(
        init_scale=scale,
        scale_window=precision.loss_scale_window,
        min_scale=precision.min_loss_scale,
        delayed_shift=precision.hysteresis,
        consecutive_hysteresis=False,
    )
    made.cur_iter = int(state["good_iterations"])
    made.cur_hysteresis = int(state["overflows_left"])
    return made


def _as_deepspeed_keeps_it(
    own: MegatronOptimizer, groups: Sequence[ParamGroup], loss_scale: LossScale
) -> dict[str, object]:
    """Return our optimizer's state in the form that DeepSpeed uses without ZeRO."""
    named, steps = own.named_state(), float(read_scalars(own.scalars()).steps)
    ordered = (name for group in groups for name, _ in group.parameters)
    numbers = {name: at for at, name in enumerate(ordered)}
    state = {
        numbers[name]: {"step": torch.tensor(steps)}
        | {kind: _compact(value) for kind, value in kinds.items() if kind != "master"}
        for name, kinds in named.items()
    }
    numbered = [{"params": [numbers[name] for name, _ in group.parameters]} for group in groups]
    base: dict[str, object] = {"state": state, "param_groups": numbered}
    if not any("master" in kinds for kinds in named.values()):
        return base
    masters = [
        [_compact(_master_of(named[name], p)) for name, p in group.parameters] for group in groups
    ]
    scale, dynamic = loss_scale
    return {
        "optimizer_state_dict": base,
        "fp32_groups": masters,
        "dynamic_loss_scale": bool(dynamic),
        "cur_scale": scale,
        "cur_iter": int(dynamic.get("good_iterations", 0)),
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": 1000,
    }


def _master_of(kinds: Mapping[str, Tensor], parameter: Parameter) -> Tensor:
    return kinds.get("master", parameter)


def _compact(tensor: Tensor) -> Tensor:
    """Return the tensor without unused storage: torch.save writes the whole storage of a view."""
    values = tensor.detach()
    whole = values.untyped_storage().nbytes() == values.numel() * values.element_size()
    return values if whole else values.clone()
