"""A whole model as DeepSpeed runs it: the list of layers in one module, from tokens to a loss.

At ZeRO stage 3 a layer is shared out as soon as it is built and filled, so no rank ever has more
than one layer of the model beside its own share. Initial values are those of every other layout:
each rank draws them by seed and name. Calling the module runs it; layers are called through their
hooks, by which stage 3 gathers weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor, nn

from megatron import device
from megatron.engine.base import Measure, PretrainTask
from megatron.engine.deepspeed.grid import DeepSpeedGrid
from megatron.engine.deepspeed.interface import partitioned
from megatron.json_values import JsonValue
from megatron.model.init import initialize_parameters
from megatron.model.losses import LossSum
from megatron.model.specs import Carry, LayerSpec, ModelBuild
from megatron.model.stage import assemble, run_layers

Share = Callable[[nn.Module], None]


class DeepSpeedModel(nn.Module):
    """A module with every layer of `specs` under its global name.

    Args:
        share: is given each layer once it has its values, and may keep a part of them only.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        task: PretrainTask,
        build: ModelBuild,
        *,
        seed: int,
        share: Share | None = None,
    ) -> None:
        super().__init__()
        self._specs = tuple(specs)
        self._loss: Measure = partial(_loss_of, task, build)
        for spec in specs:
            if spec.name in dict(self.named_modules()):
                continue
            layer = _filled(spec, build, seed=seed)
            if share is not None:
                share(layer)
            assemble(self, [replace(spec, build=partial(_itself, layer))])

    def forward(self, inputs: Carry, labels: Carry) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of one micro-batch, and how many tokens were counted."""
        carry = run_layers(self, self._specs, inputs)
        loss = self._loss(carry, labels)
        return loss.total, loss.count

    @contextmanager
    def measured_by(self, measure: Measure) -> Iterator[None]:
        """Return the values of `measure` from `forward` inside the block, instead of the loss."""
        before, self._loss = self._loss, measure
        try:
            yield
        finally:
            self._loss = before

    def used_elsewhere(self) -> Iterator[nn.Parameter]:
        """Yield parameters that a layer uses without its `forward` (a tied embedding's)."""
        for spec in self._specs:
            if spec.call != "forward":
                yield from self.get_submodule(spec.name).parameters()


def zero3_partitioner(
    deepspeed: ModuleType, json: dict[str, JsonValue], build: ModelBuild, grid: DeepSpeedGrid
) -> Share:
    """Return a function that partitions a layer over replicas as ZeRO stage 3 does."""

    def share(layer: nn.Module) -> None:
        parameters = list(layer.parameters())
        deepspeed.zero.Init(
            module=layer,
            data_parallel_group=build.ctx.dp.handle,
            config_dict_or_path=json,
            mpu=grid,
        )
        for parameter in parameters:
            _zero_padding(parameter)

    return share


@contextmanager
def weights_saved_by_reference(stage: int) -> Iterator[None]:
    """Let `F.linear` save a reference to a weight at stage 3, instead of its present memory.

    torch keeps a transposed view, which would hold every gathered weight until its backward pass.
    Backward passes belong inside too: a recomputation has to save the same tensors as before.
    """
    if stage < 3:
        yield
        return
    functional = torch.nn.functional
    before = functional.linear
    functional.linear = import_module("deepspeed.runtime.zero.linear").zero3_linear_wrap
    try:
        yield
    finally:
        functional.linear = before


def _filled(spec: LayerSpec, build: ModelBuild, *, seed: int) -> nn.Module:
    """Return one layer with its initial values, on the device of this process."""
    root = nn.Module()  # gives it its global name
    with torch.device(device.current()):
        assemble(root, [spec])
    initialize_parameters(root, seed=seed, ctx=build.ctx)
    return root.get_submodule(spec.name)


def _itself(layer: nn.Module) -> nn.Module:
    return layer


def _loss_of(task: PretrainTask, build: ModelBuild, carry: Carry, labels: Carry) -> LossSum:
    return task.loss(carry, labels, build)


def _zero_padding(parameter: nn.Parameter) -> None:
    """Zero the padding of a partition, which DeepSpeed leaves uninitialised."""
    part = partitioned(parameter)
    length, rank = part.partition_numel(), part.ds_zero_partition_rank
    used = min(max(part.ds_numel - rank * length, 0), length)
    part.ds_tensor[used:].zero_()
