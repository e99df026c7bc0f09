"""Which parameters are decayed, and which have a learning rate of their own, by global names.

Biases and the weights of norms are never decayed: decay pulls towards zero, and a norm's weight
belongs near one. The rule depends on dimensions, not on classes, so it needs no list of layers.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

# Both tables of words: Megatron-LM's "embedding or output parameters".
_DECOUPLED = ("embedding.word.weight", "output.weight")

Dimensions = Callable[[Parameter], int]


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Parameters, by global name, with the same learning rate and factor on weight decay."""

    name: str
    parameters: tuple[tuple[str, Parameter], ...]
    weight_decay_multiplier: float = 1.0
    decoupled: bool = False  # updated with the learning rate of word tables, where there is one


@dataclass(frozen=True, slots=True)
class UpdateRates:
    """The rates of one update."""

    learning_rate: float
    weight_decay: float
    decoupled_learning_rate: float | None = None  # of groups that are decoupled; None: the same

    def of(self, group: ParamGroup) -> tuple[float, float]:
        """Return the learning rate and the weight decay of a group."""
        own = self.decoupled_learning_rate if group.decoupled else None
        rate = self.learning_rate if own is None else own
        return rate, self.weight_decay * group.weight_decay_multiplier


def is_decayed(name: str, parameter: Parameter, dimensions: Dimensions = Tensor.dim) -> bool:
    """Return whether weight decay applies: to matrices, but not to biases."""
    return dimensions(parameter) > 1 and name.rpartition(".")[2] != "bias"


def param_groups(
    named_parameters: Iterable[tuple[str, Parameter]],
    dimensions: Dimensions = Tensor.dim,
    *,
    decoupled: bool = False,
) -> tuple[ParamGroup, ...]:
    """Return the trainable parameters as the groups `decoupled`, `decayed` and `not_decayed`.

    Empty groups are left out.

    Args:
        dimensions: how many a parameter has, where a rank does not hold it in its own shape.
        decoupled: the tables of words are a group of their own.
    """
    trainable = [
        (name, parameter) for name, parameter in named_parameters if parameter.requires_grad
    ]
    words = _DECOUPLED if decoupled else ()
    others = [pair for pair in trainable if pair[0] not in words]
    groups = (
        ParamGroup("decoupled", tuple(p for p in trainable if p[0] in words), decoupled=True),
        ParamGroup("decayed", tuple(p for p in others if is_decayed(*p, dimensions))),
        ParamGroup("not_decayed", tuple(p for p in others if not is_decayed(*p, dimensions)), 0.0),
    )
    return tuple(group for group in groups if group.parameters)
