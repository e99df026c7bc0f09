"""Which parameters are decayed, by rule over their global names.

Biases and the weights of norms are never decayed: decay pulls towards zero, and a norm's weight
belongs near one. The rule depends on dimensions, not on classes, so it needs no list of layers.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

Dimensions = Callable[[Parameter], int]


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Parameters, by global name, with the same factors on learning rate and weight decay."""

    name: str
    parameters: tuple[tuple[str, Parameter], ...]
    weight_decay_multiplier: float = 1.0
    lr_multiplier: float = 1.0


def is_decayed(name: str, parameter: Parameter, dimensions: Dimensions = Tensor.dim) -> bool:
    """Return whether weight decay applies: to matrices, but not to biases."""
    return dimensions(parameter) > 1 and name.rpartition(".")[2] != "bias"


def param_groups(
    named_parameters: Iterable[tuple[str, Parameter]], dimensions: Dimensions = Tensor.dim
) -> tuple[ParamGroup, ...]:
    """Return the trainable parameters as the groups `decayed` and `not_decayed`.

    Empty groups are left out.

    Args:
        dimensions: how many a parameter has, where a rank does not hold it in its own shape.
    """
    trainable = [
        (name, parameter) for name, parameter in named_parameters if parameter.requires_grad
    ]
    decayed = tuple(pair for pair in trainable if is_decayed(*pair, dimensions))
    spared = tuple(pair for pair in trainable if not is_decayed(*pair, dimensions))
    groups = (ParamGroup("decayed", decayed), ParamGroup("not_decayed", spared, 0.0))
    return tuple(group for group in groups if group.parameters)
