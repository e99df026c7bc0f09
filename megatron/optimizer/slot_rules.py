"""Which update rule a parameter has, and the update of slots by their rules.

SGD is not among them: torch steps it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import Parameter

from megatron.config.optimizer import OptimizerConfig, OptimizerKind
from megatron.mpu.context import ParallelContext
from megatron.ops.adamw import AdamwRule
from megatron.optimizer import adamw, lion, muon
from megatron.optimizer.host_state import HostState
from megatron.optimizer.slots import Slot, StepScalars


class GroupNumbers(NamedTuple):
    """The numbers of an update of one group of parameters."""

    rate: float
    decay: float
    epsilon_multiplier: float = 1.0  # factor on AdamW's epsilon


class SlotRules:
    """The update rules of a run."""

    def __init__(self, config: OptimizerConfig, ctx: ParallelContext) -> None:
        self._config, self._ctx = config, ctx

    def kind(self, name: str, parameter: Parameter) -> OptimizerKind:
        """Return the rule that updates a parameter with this global name."""
        config = self._config
        if config.optimizer is OptimizerKind.MUON and not muon.is_matrix(name, parameter):
            return config.muon_scalar_optimizer
        return config.optimizer

    def is_by_muon(self, name: str, parameter: Parameter) -> bool:
        """Return whether Muon updates a parameter."""
        return self.kind(name, parameter) is OptimizerKind.MUON

    def by_kind(self, slots: Sequence[Slot]) -> dict[OptimizerKind, list[Slot]]:
        """Return slots by their rules, for `update`; names do not change, so once is enough."""
        found: dict[OptimizerKind, list[Slot]] = {}
        for slot in slots:
            found.setdefault(self.kind(slot.name, slot.parameter), []).append(slot)
        return found

    def update(
        self,
        by_kind: Mapping[OptimizerKind, Sequence[Slot]],
        gradients: Mapping[str, Tensor],
        numbers: GroupNumbers,
        scalars: StepScalars,
        host: HostState,
    ) -> None:
        """Update weights, state and the model's half-precision parameters of one group.

        Args:
            by_kind: the slots of the group, by their rules.
            gradients: by the name of the slot, of as many elements, contiguous.
            host: has the state of the slots that are on it.
        """
        config, (rate, decay, epsilon_multiplier) = self._config, numbers
        for kind, of_kind in by_kind.items():
            if kind is OptimizerKind.MUON:
                rule = muon.MuonRule(rate, decay, config)
                muon.update_slots(of_kind, gradients, rule, scalars, self._ctx)
            elif kind is OptimizerKind.LION:
                signs = lion.LionRule(rate, config.lion_beta1, config.lion_beta2, decay)
                lion.update_slots(of_kind, gradients, signs, scalars)
            else:
                betas = (config.adam_beta1, config.adam_beta2)
                epsilon = config.adam_eps * epsilon_multiplier
                means = AdamwRule(rate, *betas, epsilon, decay)
                adamw.update_slots(of_kind, gradients, means, scalars, host)
