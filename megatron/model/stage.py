"""Builds a slice of a list of specs under its global names, and runs it.

Names never depend on where the pipeline cuts: layer 17 is `layers.17` on whichever stage it is.
"""

from collections.abc import Iterator, Sequence

from torch import nn

from megatron.model.specs import Carry, LayerSpec, Span


class Stage(nn.Module):
    """The contiguous part of a model that one pipeline rank holds, one set of names for all."""

    def __init__(self, specs: Sequence[LayerSpec], span: Span | None = None) -> None:
        super().__init__()
        self.span = span or Span.whole(specs)
        self._specs = tuple(specs[self.span.start : self.span.stop])
        assemble(self, self._specs)

    def forward(self, carry: Carry) -> Carry:
        """Run every layer of the span on what the stage before it handed over."""
        return run_layers(self, self._specs, carry)

    def tied_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters, by global name, that other stages may hold too."""
        return dict(_tied(self, self._specs))


def assemble(root: nn.Module, specs: Sequence[LayerSpec]) -> None:
    """Build every layer of `specs` below `root` under its global name, each name once."""
    for spec in specs:
        if _find(root, spec.name) is None:
            _put(root, spec.name, spec.build())


def run_layers(root: nn.Module, specs: Sequence[LayerSpec], carry: Carry) -> Carry:
    """Hand `carry` through the layers that `assemble` put below `root`, in the list's order."""
    for spec in specs:
        module = root.get_submodule(spec.name)
        # Through __call__ where possible, so that hooks on a layer run.
        carry = module(carry) if spec.call == "forward" else getattr(module, spec.call)(carry)
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
