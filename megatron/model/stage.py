"""Builds slices of a list of specs under their global names, and runs them.

Names never depend on where the pipeline cuts: layer 17 is `layers.17` on whichever stage it is, and
in whichever chunk of it.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from megatron.model.specs import Carry, LayerSpec
from megatron.mpu.partition import set_sharding_unit
from megatron.mpu.stage_plan import LayerRange


class LayerWeights(Protocol):
    """Makes the parameters of a layer whole while it runs."""

    def run(
        self,
        at: int,
        module: nn.Module,
        layer: Callable[[Carry], Carry],
        carry: Carry,
        *,
        is_last: bool,
    ) -> Carry:
        """Run `layer`, at place `at` in the whole model, with the parameters of `module`."""


class PipelineStage(nn.Module):
    """The parts of a model that one pipeline rank holds, one set of names for all.

    A stage has one contiguous part, a chunk, or several where the pipeline is interleaved; chunk 0
    stands first in the model. None: the whole list as one chunk.

    Args:
        built: called with each module and its global name as soon as it is built, before the next.
        weights: runs each layer, where parameters are not always whole.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        ranges: Sequence[LayerRange] | None = None,
        *,
        built: Callable[[str, nn.Module], None] | None = None,
        weights: LayerWeights | None = None,
    ) -> None:
        super().__init__()
        self.ranges = (LayerRange(0, len(specs)),) if ranges is None else tuple(ranges)
        self._chunks = tuple(tuple(specs[start:stop]) for start, stop in self.ranges)
        self._weights, self._specs = weights, specs
        for chunk in self._chunks:
            assemble(self, chunk, built)

    def forward(self, carry: Carry) -> Carry:
        """Run a stage of one chunk on the output of the previous stage."""
        assert len(self._chunks) == 1, self.ranges  # noqa: S101  # invariant: else ask for a chunk
        return self.run(0, carry)

    def run(self, chunk: int, carry: Carry) -> Carry:
        """Run every layer of one chunk on the output of the previous chunk of the model."""
        around = around_layers(self._weights, self._specs, self.ranges[chunk].start)
        return run_layers(self, self._chunks[chunk], carry, around)

    def place_of(self, name: str) -> int:
        """Return the place in the whole model of the layer that has a module or a parameter.

        A layer that stands in it several times counts where it stands first; what is in none is
        after all of them.
        """
        for (start, _), chunk in zip(self.ranges, self._chunks):
            for at, spec in enumerate(chunk, start):
                if name == spec.name or name.startswith(f"{spec.name}."):
                    return at
        return len(self._specs)

    def tied_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters, by global name, that other stages may hold too."""
        return dict(_tied(self, [spec for chunk in self._chunks for spec in chunk]))

    def repeated_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that more than one layer of this stage uses."""
        names = [spec.tied or spec.name for chunk in self._chunks for spec in chunk]
        twice = {name for name in names if names.count(name) > 1}
        for name, parameter in self.named_parameters():
            if any(name.startswith(f"{module}.") for module in twice):
                yield parameter


def around_layers(
    weights: LayerWeights | None, specs: Sequence[LayerSpec], start: int
) -> "RunLayer | None":
    """Return what runs each layer of a part of `specs` with its weights; None: just the layer.

    Args:
        start: where the part begins, as in a slice.
    """
    if weights is None:
        return None
    last = len(specs) - 1
    first = start if start >= 0 else len(specs) + start

    def around(at: int, module: nn.Module, layer: Callable[[Carry], Carry], carry: Carry) -> Carry:
        place = first + at
        return weights.run(place, module, layer, carry, is_last=place == last)

    return around


def parameters_of_layers(specs: Sequence[LayerSpec]) -> tuple[int, ...]:
    """Return the parameter count per layer on one tensor-parallel rank, building none.

    A shared parameter counts in each layer that uses it.
    """
    with torch.device("meta"):
        return tuple(sum(p.numel() for p in spec.build().parameters()) for spec in specs)


def blocks_of(specs: Sequence[LayerSpec]) -> LayerRange:
    """Return the range from the first to the last transformer layer; all layers without one."""
    marked = [at for at, spec in enumerate(specs) if spec.block]
    return LayerRange(marked[0], marked[-1] + 1) if marked else LayerRange(0, len(specs))


def ends_of_blocks(specs: Sequence[LayerSpec]) -> tuple[int, ...]:
    """Return for each transformer layer where a stage of which it is the last one ends."""
    ends = []
    for at, spec in enumerate(specs, 1):
        if spec.block:
            ends.append(at)
        elif spec.ends_stack:
            ends[-1] = at
    return tuple(ends) or tuple(range(1, len(specs) + 1))


def assemble(
    root: nn.Module,
    specs: Sequence[LayerSpec],
    built: Callable[[str, nn.Module], None] | None = None,
) -> None:
    """Build every layer of `specs` below `root` under its global name, each name once.

    The parameters of a layer are a unit, and those of a tied module are one of their own.
    """
    for spec in specs:
        if _find(root, spec.name) is not None:
            continue
        module = spec.build()
        for name, parameter in module.named_parameters(prefix=spec.name):
            is_tied = spec.tied is not None and name.startswith(f"{spec.tied}.")
            set_sharding_unit(parameter, spec.tied if spec.tied and is_tied else spec.name)
        _put(root, spec.name, module)
        if built is not None:
            built(spec.name, module)


RunLayer = Callable[[int, nn.Module, Callable[[Carry], Carry], Carry], Carry]
"""Runs one layer: its place among the specs, its module, what is called, and the carry."""


def run_layers(
    root: nn.Module, specs: Sequence[LayerSpec], carry: Carry, around: RunLayer | None = None
) -> Carry:
    """Run `carry` through the layers that `assemble` put below `root`, in the list's order.

    These specs are one virtual stage: layers that are recomputed or offloaded count from its first.
    """
    memory = next((spec.memory for spec in specs if spec.memory is not None), None)
    if memory is None or not root.training:
        return _run_each(root, specs, carry, around)
    return memory.run(
        lambda start, stop, carry: _run_each(root, specs[:stop], carry, around, start),
        carry,
        is_block=[spec.block for spec in specs],
        weights=root.parameters(),
    )


def _run_each(
    root: nn.Module,
    specs: Sequence[LayerSpec],
    carry: Carry,
    around: RunLayer | None,
    start: int = 0,
) -> Carry:
    for at, spec in enumerate(specs[start:], start):
        module = root.get_submodule(spec.name)
        # Through __call__ where possible, so that hooks on a layer run.
        layer = module if spec.call == "forward" else getattr(module, spec.call)
        if spec.around is not None:
            layer = partial(spec.around, layer)
        carry = layer(carry) if around is None else around(at, module, layer, carry)
    return carry


def _tied(root: nn.Module, specs: Sequence[LayerSpec]) -> Iterator[tuple[str, nn.Parameter]]:
    shared = {spec.tied for spec in specs if spec.tied is not None}
    for name, parameter in root.named_parameters():
        if any(name.startswith(f"{module}.") for module in shared):
            yield name, parameter


def _find(root: nn.Module, name: str) -> nn.Module | None:
    try:
        return root.get_submodule(name)
    except AttributeError:
        return None


def _put(root: nn.Module, name: str, module: nn.Module) -> None:
    *parents, leaf = name.split(".")
    node = root
    for part in parents:
        if part not in node._modules:
            node.add_module(part, nn.Module())
        node = node.get_submodule(part)
    node.add_module(leaf, module)
