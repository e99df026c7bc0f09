"""Shows every tensor that the modules of a stage hand on, while their passes are computed again.

What a reader would get wrong: layers that are recomputed run twice, the second time in the backward
pass; modules inside a compiled layer are not seen, and of a layer that is called by another method
than `forward` only the modules inside it are.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from functools import partial

from torch import Tensor, nn


class TensorKind(IntEnum):
    """What a tensor is, in the order in which a step computes them."""

    PARAMETER = 0
    OUTPUT = 1
    LOSS = 2
    OUTPUT_GRADIENT = 3
    PARAMETER_GRADIENT = 4

    def __str__(self) -> str:
        return {
            TensorKind.PARAMETER: "parameter",
            TensorKind.OUTPUT: "output (forward)",
            TensorKind.LOSS: "loss",
            TensorKind.OUTPUT_GRADIENT: "gradient of the output (backward)",
            TensorKind.PARAMETER_GRADIENT: "gradient of the parameter (backward)",
        }[self]


# Is given the global name of a module, what the tensor is, and the tensor.
Observer = Callable[[str, TensorKind, Tensor], None]


@contextmanager
def observed(stage: nn.Module, observer: Observer) -> Iterator[None]:
    """Inside the block give `observer` each floating output of a module, and its gradient."""

    def of_module(name: str, module: nn.Module, inputs: object, output: object) -> None:
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            observer(name, TensorKind.OUTPUT, tensor.detach())
            if tensor.requires_grad:
                tensor.register_hook(partial(observer, name, TensorKind.OUTPUT_GRADIENT))  # type: ignore[no-untyped-call]

    with ExitStack() as hooks:
        for name, module in stage.named_modules():
            if name:
                hooks.callback(module.register_forward_hook(partial(of_module, name)).remove)
        yield
