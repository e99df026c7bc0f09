"""Which parameters are decayed, and at which learning rates they are updated, by global names.

Biases and the weights of norms are never decayed: decay pulls towards zero, and a norm's weight
belongs near one. The rule depends on dimensions, not on classes, so it needs no list of layers.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor
from torch.nn import Parameter

from megatron.config.optimizer import OptimizerKind
from megatron.config.run import RunConfig

_NAMES = ("decoupled", "decayed", "not_decayed")  # of groups, in their order
# Both tables of words: Megatron-LM's "embedding or output parameters".
_DECOUPLED = ("embedding.word.weight", "output.weight")
_HEAD = "classification_head"

Dimensions = Callable[[Parameter], int]


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Parameters, by global name, with the same learning rate and factor on weight decay.

    Attributes:
        decoupled: updated with the learning rate of the tables of words, where there is one.
        rate_multiplier: factor on the learning rate, of muP and of the layer.
        epsilon_multiplier: factor on AdamW's epsilon, of muP.
    """

    name: str
    parameters: tuple[tuple[str, Parameter], ...]
    weight_decay_multiplier: float = 1.0
    decoupled: bool = False
    rate_multiplier: float = 1.0
    epsilon_multiplier: float = 1.0


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
        return rate * group.rate_multiplier, self.weight_decay * group.weight_decay_multiplier


class LayerRates(NamedTuple):
    """Factors on learning rates by depth (Bao et al. 2021, arXiv 2106.08254, appendix).

    Attributes:
        num_layers: transformer layers of the whole model; the embedding is below them.
        decay: the factor of each layer to the one above it, of which the head is the highest.
        head: the factor of the head.
    """

    num_layers: int = 0
    decay: float = 1.0
    head: float = 1.0

    @classmethod
    def of_run(cls, config: RunConfig) -> "LayerRates":
        """Return the factors that the flags of a run give."""
        vision = config.vision
        return cls(config.model.num_layers, vision.layer_lr_decay, vision.head_lr_mult)

    def factor(self, name: str) -> float:
        """Return the factor of a parameter, by its global name."""
        first, _, rest = name.partition(".")
        if first == _HEAD:
            return self.head
        if first == "layers":
            return self.decay ** (self.num_layers - int(rest.partition(".")[0]))
        # The norm after the last layer belongs to the highest place, beside the head.
        return self.decay ** (self.num_layers + 1) if first == "embedding" else 1.0


class GroupingRules(NamedTuple):
    """What parts the trainable parameters into groups.

    Attributes:
        decoupled: the tables of words are a group of their own.
        width: how many times wider the model is than the one whose learning rates are given (muP).
        rule: the rule that updates them.
        is_by_muon: whether Muon updates a parameter, whose updates muP leaves alone.
        layer_rates: factors on the learning rates of layers.
    """

    decoupled: bool = False
    width: float = 1.0
    rule: OptimizerKind = OptimizerKind.ADAM
    is_by_muon: Callable[[str, Parameter], bool] = lambda name, parameter: False
    layer_rates: LayerRates = LayerRates()


_PLAIN = GroupingRules()


def is_decayed(name: str, parameter: Parameter, dimensions: Dimensions = Tensor.dim) -> bool:
    """Return whether weight decay applies: to matrices, but not to biases."""
    return dimensions(parameter) > 1 and name.rpartition(".")[2] != "bias"


def param_groups(
    named_parameters: Iterable[tuple[str, Parameter]],
    dimensions: Dimensions = Tensor.dim,
    *,
    rules: GroupingRules = _PLAIN,
) -> tuple[ParamGroup, ...]:
    """Return the trainable parameters as the groups `decoupled`, `decayed` and `not_decayed`.

    Empty groups are left out. Those have parts of their own that are updated at another rate, or
    with another epsilon, under muP and where learning rates differ by layer.

    Args:
        dimensions: how many a parameter has, where a rank does not hold it in its own shape.
    """
    groups: dict[tuple[str, float, float], list[tuple[str, Parameter]]] = {}
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        is_matrix = is_decayed(name, parameter, dimensions)
        group = "decayed" if is_matrix else "not_decayed"
        group = "decoupled" if rules.decoupled and name in _DECOUPLED else group
        rate, epsilon = _mup_factors(name, parameter, rules, is_matrix=is_matrix)
        key = (group, rate * rules.layer_rates.factor(name), epsilon)
        groups.setdefault(key, []).append((name, parameter))
    return tuple(
        ParamGroup(
            name,
            tuple(groups[name, rate, epsilon]),
            weight_decay_multiplier=float(name != "not_decayed"),
            decoupled=name == "decoupled",
            rate_multiplier=rate,
            epsilon_multiplier=epsilon,
        )
        for name, rate, epsilon in sorted(groups, key=lambda key: (_NAMES.index(key[0]), key))
    )


def in_groups(groups: Sequence[ParamGroup], count: int) -> tuple[ParamGroup, ...]:
    """Return the same parameters in `count` groups: the largest ones are split in halves.

    Raises:
        ValueError: there are more groups, or fewer parameters than groups.
    """
    parts = list(groups)
    if not len(parts) <= count <= sum(len(part.parameters) for part in parts):
        raise ValueError(f"{len(parts)} groups cannot be made {count}")
    while len(parts) < count:
        at = max(range(len(parts)), key=lambda place: len(parts[place].parameters))
        largest = parts[at].parameters
        middle = len(largest) // 2
        halves = (largest[:middle], largest[middle:])
        parts[at : at + 1] = [replace(parts[at], parameters=half) for half in halves]
    return tuple(parts)


def _mup_factors(
    name: str, parameter: Parameter, rules: GroupingRules, *, is_matrix: bool
) -> tuple[float, float]:
    """Return the factors on the learning rate and on AdamW's epsilon.

    Yang et al. 2022 (arXiv 2203.03466), table 8 and appendix B.3: updates of what has rows as long
    as the model is wide. A table of tokens is read row by row, so it does not count; the output
    layer does. A learning rate that was given to tables alone is left as it was given.
    """
    width, is_wide = rules.width, is_matrix and name.partition(".")[0] != "embedding"
    given = rules.decoupled and name in _DECOUPLED
    if width == 1.0 or rules.is_by_muon(name, parameter):
        return 1.0, 1.0
    if rules.rule is OptimizerKind.SGD:
        return (1.0 if is_wide or given else width), 1.0
    if not is_wide:
        return 1.0, 1.0
    return (1.0 if given else 1 / width), 1 / width
