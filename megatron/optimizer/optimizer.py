"""The optimizer: takes summed gradients to new weights, and keeps its state under global names.

A step reads the gradients once for their norm and once for the update: mean over tokens, loss
scale and clipping are a single factor, which AdamW applies as it reads them. Whether a step is
taken is agreed on by all ranks, and decided on the device: a step that is skipped runs the same
kernels, which change nothing. The state that leaves here (`named_state`, `scalars`) has the shapes
of the local parameters and nothing of torch's layout. With sharded parameters a rank has state, and
makes updates, for its own elements alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron import device
from megatron.config.optimizer import OptimizerConfig, OptimizerKind
from megatron.config.precision import PrecisionConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.json_values import JsonObject, JsonValue
from megatron.mpu.context import ParallelContext, Replicas
from megatron.mpu.scalar_sums import HostScalars, ScalarSums
from megatron.optimizer.buckets import ElementRange
from megatron.optimizer.clip_grads import (
    clip_factor,
    count_zeros,
    owned_by_this_rank,
    sum_of_squares,
)
from megatron.optimizer.data_parallel import DistributedDataParallel, Shards
from megatron.optimizer.grad_buffer import HALF_DTYPES
from megatron.optimizer.grad_scaler import GradScaler, build_scaler
from megatron.optimizer.host_state import HostState, first_share
from megatron.optimizer.param_groups import (
    GroupingRules,
    LayerRates,
    ParamGroup,
    UpdateRates,
    param_groups,
)
from megatron.optimizer.slot_rules import GroupNumbers, SlotRules
from megatron.optimizer.slots import Slot, StepScalars
from megatron.optimizer.update_rule import fresh_state, update_rule

APPLIED = "update applied"  # among the scalars of `MegatronOptimizer.update`
_NAMES_SHOWN = 5
_STEPS, _SCALER = "steps", "loss_scaler"
# Scalars of a step: the sums over all ranks, and what `update` makes of them.
_SQUARES, _NOT_FINITE, _ZEROS = "squares of gradients", "gradients not finite", "zero gradients"
_NORM, _LOSS_SCALE = "gradient norm", "loss scale"
_TOO_SMALL = "loss scale too small"


@dataclass(frozen=True, slots=True)
class OptimizerReport:
    """The outcome of one step; the same on all ranks.

    Where replicas hold different gradients, which is an error elsewhere, `grad_norm` is that of the
    first one.
    """

    applied: bool  # the weights have changed
    finite: bool  # every gradient was finite, and so was their norm
    grad_norm: float  # of the mean gradient before clipping; inf or nan if not finite
    loss_scale: float  # that the gradients of this step were made with
    overflow: bool = False  # not finite under dynamic loss scaling, where it is expected at times
    num_zeros: int | None = None


class OptimizerScalars(NamedTuple):
    """What `MegatronOptimizer.scalars` holds, read from a checkpoint."""

    steps: int
    loss_scaler: dict[str, float]


def read_scalars(scalars: JsonObject) -> OptimizerScalars:
    """Return the number of updates and the state of the loss scale; CheckpointError without."""
    steps, scaler = scalars.get(_STEPS), scalars.get(_SCALER)
    if not isinstance(steps, int) or not isinstance(scaler, Mapping):
        raise CheckpointError(
            "the checkpoint lacks the optimizer's number of updates or its loss scale",
            found=f"fields: {', '.join(sorted(scalars)) or 'none'}",
            fix="resume from another checkpoint, or use --no-load-optim",
        )
    numbers = {name: value for name, value in scaler.items() if isinstance(value, int | float)}
    return OptimizerScalars(steps, numbers)


class MegatronOptimizer(ABC):
    """Turns the gradients of parameters with global names into an update; see the subclasses.

    All ranks must construct it and call `step` together.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        *,
        config: OptimizerConfig,
        scaler: GradScaler,
        ctx: ParallelContext,
        shards: Shards | None = None,
    ) -> None:
        self._groups = tuple(groups)
        self._shards = shards
        self._config = config
        self._host = HostState()
        self._rules = SlotRules(config, ctx)
        self._scaler = scaler
        self._ctx = ctx
        # On the device, where it is decided whether an update counts.
        self._steps = torch.zeros((), dtype=torch.float64, device=device.current())
        pairs = [pair for group in self._groups for pair in group.parameters]
        counted = {
            name for (name, _), is_own in zip(pairs, owned_by_this_rank(pairs, ctx)) if is_own
        }
        on_host = self._waiting_on_host(pairs)
        by_group = [
            [
                self._slot_of(name, parameter, name in on_host)
                for name, parameter in group.parameters
                if self._elements(parameter)
            ]
            for group in self._groups
        ]
        self._by_group = [self._rules.by_kind(slots) for slots in by_group]
        self._slots = [slot for slots in by_group for slot in slots]
        # By the ranks that hold the same gradients, or shares of them: those that count here.
        self._counted: dict[Replicas, list[bool]] = {
            replicas: [
                slot.name in counted and ctx.replicas.of(slot.parameter) == replicas
                for slot in self._slots
            ]
            for replicas in (ctx.replicas.dense, ctx.replicas.experts)
        }
        # All others are stepped here. torch's rules load its compiler as soon as they are made,
        # with which a rank takes 70 MB more.
        self._sgd: torch.optim.Optimizer | None = None
        if self._is_sgd:
            weights = [[slot.weight for slot in slots] for slots in by_group]
            self._sgd = update_rule(weights, config)
            self._sgd.state.update((slot.weight, slot.state) for slot in self._slots)

    @property
    def groups(self) -> tuple[ParamGroup, ...]:
        """The parameters, as they are grouped."""
        return self._groups

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss before backward; waits for the device if it may change."""
        return float(self._scaler.scale)

    @property
    def device_loss_scale(self) -> Tensor | float:
        """The factor on the next loss before backward; the update divides by it."""
        return self._scaler.scale

    def step(
        self,
        rates: UpdateRates,
        *,
        grad_multiplier: float = 1.0,
        with_zeros: bool = False,
    ) -> OptimizerReport:
        """Do `add_to` and `update`, and wait for the report.

        Raises:
            NumericsError: the gradients overflow at the smallest loss scale.
        """
        sums = ScalarSums(self._ctx.world)
        gradients = self.add_to(sums, with_zeros=with_zeros)
        outcome = self.update(gradients, sums.reduce(), rates, grad_multiplier=grad_multiplier)
        return self.report(HostScalars(outcome).read())

    def add_to(self, sums: ScalarSums, *, with_zeros: bool = False) -> list[Tensor]:
        """Add the scalars to `sums` that decide about an update; return the gradients for it.

        Args:
            with_zeros: also count the gradients that are exactly zero.
        """
        gradients = [self._gradient(slot) for slot in self._slots]
        squares = zeros = seen = torch.zeros((), dtype=torch.float64, device=device.current())
        for replicas, counts in self._counted.items():
            counted = list(compress(gradients, counts))
            of_group = sum_of_squares(counted)
            seen = seen + of_group
            # Replicas have equal gradients, or shares of them.
            shared_out = self._shards is not None
            if replicas.counts_share if shared_out else replicas.all.is_first:
                squares = squares + of_group
                zeros = zeros + count_zeros(counted) if with_zeros else zeros
        sums.add(_SQUARES, squares)
        sums.add(_NOT_FINITE, ~torch.isfinite(seen))
        if with_zeros:
            sums.add(_ZEROS, zeros)
        return gradients

    def update(
        self,
        gradients: Sequence[Tensor],
        sums: Mapping[str, Tensor],
        rates: UpdateRates,
        *,
        grad_multiplier: Tensor | float = 1.0,
    ) -> dict[str, Tensor]:
        """Update the weights, or change nothing if any gradient on any rank is not finite.

        Does not wait for the device.

        Args:
            gradients: what `add_to` returned; SGD overwrites them.
            sums: the reduced sums, with those of `add_to`.
            grad_multiplier: turns the accumulated gradients into those of the mean loss.

        Returns:
            `sums`, and scalars for `report`.
        """
        loss_scale = self._scaler.scale
        factor = grad_multiplier / loss_scale
        norm = sums[_SQUARES][0].sqrt() * factor
        # Of a rank whose squares do not contribute, the norm does not show it.
        hidden = torch.isfinite(norm) & (sums[_NOT_FINITE][0] > 0)
        norm = torch.where(hidden, torch.nan, norm)
        applied = torch.isfinite(norm)
        too_small = self._scaler.update(~applied)
        factor = factor * clip_factor(norm, self._config.clip_grad)
        of_groups = [rates.of(group) for group in self._groups]
        self._steps += applied
        if self._sgd is None:
            numbers = StepScalars(norm.new_ones(()) * factor, applied, self._steps)
            of_slot = dict(zip((slot.name for slot in self._slots), gradients, strict=True))
            for group, rates_of_group, by_kind in zip(
                self._groups, of_groups, self._by_group, strict=True
            ):
                of_group = GroupNumbers(*rates_of_group, group.epsilon_multiplier)
                self._rules.update(by_kind, of_slot, of_group, numbers, self._host)
        else:
            self._step_sgd(self._sgd, gradients, factor, applied, of_groups)
        if self._shards is not None:
            self._shards.gather()
        return {
            **sums,
            _NORM: norm,
            APPLIED: applied,
            _LOSS_SCALE: norm.new_ones(()) * loss_scale,
            _TOO_SMALL: too_small,
        }

    def report(self, scalars: Mapping[str, Sequence[float]]) -> OptimizerReport:
        """Return the outcome of an update from the values of its scalars.

        Raises:
            NumericsError: the gradients overflow at the smallest loss scale.
        """
        applied, (scale,) = bool(scalars[APPLIED][0]), scalars[_LOSS_SCALE]
        self._scaler.check(too_small=bool(scalars[_TOO_SMALL][0]), scale=scale)
        return OptimizerReport(
            applied=applied,
            finite=applied,
            grad_norm=scalars[_NORM][0],
            loss_scale=scale,
            overflow=not applied and self._scaler.expects_overflow,
            num_zeros=round(scalars[_ZEROS][0]) if _ZEROS in scalars else None,
        )

    def zero_grad(self) -> None:
        """Zero the gradients, before the first backward pass of an iteration.

        Parameters in a `GradBuffer` are zeroed there too, in one kernel: prefer its `zero`.
        """
        for slot in self._slots:
            view = getattr(slot.parameter, "main_grad", None)
            if view is None:
                slot.parameter.grad = None
            else:
                view.zero_()

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's own tensors, by global name of the parameter and kind.

        Kinds are `exp_avg` and `exp_avg_sq` (adam), `exp_avg` (lion), `momentum_buffer` (sgd, muon)
        and `master` (the fp32 weights of half-precision parameters). Each has the local shape and
        the partition of its parameter, or is one-dimensional where `owned_ranges` makes it a part.
        They are the live tensors, not copies. Masters of which the optimizer keeps the lower halves
        alone are put together where the gradients were, until the next step.
        """
        for slot in self._slots:
            slot.put_together()
        return self._tensors()

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        self._host.settle()
        return {slot.name: slot.tensors() for slot in self._slots}

    def kept(self) -> Iterator[Tensor]:
        """Yield the tensors that the optimizer has memory for; of masters what it keeps."""
        for slot in self._slots:
            yield from slot.kept()

    def owned_ranges(self) -> dict[str, ElementRange]:
        """Return the flattened elements of each sharded parameter that this rank updates.

        By global name; a parameter of which this rank has nothing is not there, nor its state.
        """
        return {slot.name: slot.owned for slot in self._slots if slot.owned is not None}

    def scalars(self) -> dict[str, JsonValue]:
        """Return the scalar state as JSON values: the number of updates, and the loss scale."""
        return {_STEPS: int(self._steps), _SCALER: self._scaler.state_dict()}

    def load_state(self, named: Mapping[str, Mapping[str, Tensor]], scalars: JsonObject) -> None:
        """Restore the state from `named_state` and `scalars` of an equal optimizer, by copying.

        The model's own weights are not touched: a caller that loads masters loads them too.

        Raises:
            CheckpointError: a tensor is missing, unknown or of another shape; nothing was changed.
        """
        own_state = self._tensors()
        _check_same_tensors(own_state, named)
        read_scalars(scalars)
        with torch.no_grad():
            for name, tensors in own_state.items():
                for kind, tensor in tensors.items():
                    tensor.copy_(named[name][kind])
        self.restored(scalars)

    @torch.no_grad()
    def restored(self, scalars: JsonObject) -> None:
        """Take over state that was written into the tensors of `named_state`, and the scalars.

        Raises:
            CheckpointError: the scalars are incomplete; nothing was changed.
        """
        counts = read_scalars(scalars)
        self._scaler.load_state_dict(counts.loss_scaler)
        for slot in self._slots:
            slot.take_apart()
        if self._shards is not None:
            self._shards.gather()  # weights that were not those of the masters are so now
        self._steps.fill_(counts.steps)

    @abstractmethod
    def _weight_of(self, values: Tensor) -> Tensor:
        """Return the tensor that the update rule works on for `values` of a parameter."""

    def refresh_masters(self) -> None:
        """Take over weights that were loaded into the model without optimizer state."""
        self._host.settle()
        with torch.no_grad():
            for slot in self._slots:
                slot.refresh_master()

    @abstractmethod
    def _publish(self) -> None:
        """Bring the model's parameters up to date with weights that SGD updated."""

    def _elements(self, parameter: Parameter) -> int:
        """Return how many elements of a parameter this rank updates."""
        return parameter.numel() if self._shards is None else self._shards.owned(parameter).size

    def _waiting_on_host(self, pairs: Sequence[tuple[str, Parameter]]) -> frozenset[str]:
        """Return the names of parameters whose state waits in host memory."""
        if not self._config.optimizer_cpu_offload:
            return frozenset()
        sizes = [self._elements(parameter) for _, parameter in pairs]
        count = first_share(sizes, self._config.optimizer_offload_fraction)
        return frozenset(name for name, _ in pairs[:count])

    def _slot_of(self, name: str, parameter: Parameter, on_host: bool) -> Slot:
        """Return this rank's part of the update of a parameter."""
        if self._shards is None:
            owned, values = None, parameter.detach()
        else:
            owned, values = self._shards.owned(parameter), self._shards.values(parameter)
        kind = self._rules.kind(name, parameter)
        may_split = kind is OptimizerKind.ADAM and not on_host
        room = self._room_for(parameter, owned, values) if may_split else None
        if room is None:
            weight = self._weight_of(values)
        else:
            weight = torch.zeros_like(values, dtype=torch.int16)
        state = fresh_state(weight, self._config, kind)
        state.pop("step", None)  # of each weight; here one count serves all
        if on_host:
            weight = weight if weight is values else self._host.keep(weight)
            state = {kind: self._host.keep(tensor) for kind, tensor in state.items()}
        return Slot(name, parameter, owned, values, weight, state, on_host, room)

    def _room_for(
        self, parameter: Parameter, owned: ElementRange | None, values: Tensor
    ) -> Tensor | None:
        """Return float32 memory of as many elements that is free between two steps.

        None, and the optimizer keeps whole masters, where it would not be the upper half of them
        that `values` are, or gradients are in half precision.
        """
        gradient: Tensor | None = getattr(parameter, "main_grad", None)
        if gradient is None or (values.dtype, gradient.dtype) != (torch.bfloat16, torch.float32):
            return None
        return _elements_of(gradient, owned)

    def _gradient(self, slot: Slot) -> Tensor:
        gradient = getattr(slot.parameter, "main_grad", None)
        if gradient is None:
            gradient = slot.parameter.grad
        if gradient is None:
            raise ConfigError(
                "a parameter has no gradient",
                found=slot.name,
                fix="run backward first, and use every parameter in the loss",
            )
        gradient = _elements_of(gradient, slot.owned)
        if not self._is_sgd:
            return gradient.contiguous()
        return gradient.to(slot.weight.dtype)  # a copy only for half-precision gradients

    def _step_sgd(
        self,
        rule: torch.optim.Optimizer,
        gradients: Sequence[Tensor],
        factor: Tensor | float,
        applied: Tensor,
        rates: Sequence[tuple[float, float]],
    ) -> None:
        for (rate, decay), target in zip(rates, rule.param_groups, strict=True):
            target["lr"], target["weight_decay"] = rate, decay
        if gradients:
            if isinstance(factor, Tensor):
                factor = factor.to(gradients[0].dtype)
            torch._foreach_mul_(list(gradients), factor)
        # torch's fused kernels return at once where this is 1.
        rule.found_inf = (~applied).float()  # type: ignore[attr-defined]
        for slot, gradient in zip(self._slots, gradients):
            slot.weight.grad = gradient
        rule.step()
        self._publish()  # rounds masters, which changes no bit where they are as they were

    @property
    def _is_sgd(self) -> bool:
        return self._config.optimizer is OptimizerKind.SGD


class FP32Optimizer(MegatronOptimizer):
    """Updates the parameters themselves, in their own dtype: float32 or float64."""

    def _weight_of(self, values: Tensor) -> Tensor:
        return values

    def _publish(self) -> None:
        """Do nothing: the update was made in place."""


class MixedPrecisionOptimizer(MegatronOptimizer):
    """Updates fp32 masters of half-precision parameters and rounds them into the model.

    The masters remember updates that are too small to show in half precision. Parameters that are
    in fp32 already have no master.
    """

    def _weight_of(self, values: Tensor) -> Tensor:
        return values.detach().float() if values.dtype in HALF_DTYPES else values

    def _publish(self) -> None:
        slots = [slot for slot in self._slots if slot.has_master]
        if not slots:
            return
        with torch.no_grad():
            torch._foreach_copy_([slot.values for slot in slots], [slot.weight for slot in slots])
        for slot in slots:
            slot.weight.grad = None  # a half-precision gradient was widened for this step only


def build_optimizer(
    parameters: nn.Module | Iterable[tuple[str, Parameter]],
    *,
    optimizer: OptimizerConfig,
    precision: PrecisionConfig,
    ctx: ParallelContext,
    replica: DistributedDataParallel | None = None,
    decoupled: bool = False,
    width: float = 1.0,
    layer_rates: LayerRates | None = None,
) -> MegatronOptimizer:
    """Return the optimizer for a module, or for parameters with their global names.

    It is a distributed one where the module, or the `replica` that the parameters are of, shards
    them. Gathers names over the pipeline group, so all ranks must call it together. Where the
    tables of words have a learning rate of their own, they are `decoupled`; `width` is how many
    times wider the model is than the one whose learning rates are given (muP); `layer_rates` are
    factors on them by layer.

    Raises:
        ConfigError: nothing is trainable here, or a parameter is of another precision.
    """
    if isinstance(parameters, DistributedDataParallel):
        replica, parameters = parameters, parameters.module  # names without the wrapper's prefix
    named = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters
    rules = GroupingRules(
        decoupled,
        width,
        optimizer.optimizer,
        is_by_muon=SlotRules(optimizer, ctx).is_by_muon,
        layer_rates=layer_rates or LayerRates(),
    )
    groups = param_groups(named, rules=rules)
    pairs = [pair for group in groups for pair in group.parameters]
    if not pairs:
        raise ConfigError(
            "there is nothing to train on this rank",
            found="no parameter with requires_grad",
            fix="give every pipeline stage at least one trainable parameter",
        )
    dtype = getattr(torch, precision.precision.value)
    allowed = {dtype, torch.float32} if precision.precision.is_half else {dtype}
    odd = [
        f"{name} ({parameter.dtype})" for name, parameter in pairs if parameter.dtype not in allowed
    ]
    if odd:
        raise ConfigError(
            "a parameter is not in the precision of the run",
            found=f"{', '.join(odd[:_NAMES_SHOWN])} in a run in {precision.precision.value}",
            fix=f"convert the model with .to(torch.{precision.precision.value}) before this",
        )
    kind = MixedPrecisionOptimizer if precision.precision.is_half else FP32Optimizer
    return kind(
        groups,
        config=optimizer,
        scaler=build_scaler(precision),
        ctx=ctx,
        shards=None if replica is None else replica.shards,
    )


def _elements_of(gradient: Tensor, owned: ElementRange | None) -> Tensor:
    """Return the gradient of what a rank updates of a parameter."""
    if owned is None:
        return gradient
    flat = gradient.view(-1)
    # A buffer keeps more than these elements, or these alone.
    return flat if flat.numel() == owned.size else flat[owned.start : owned.stop]


def _check_same_tensors(
    own: Mapping[str, Mapping[str, Tensor]], given: Mapping[str, Mapping[str, Tensor]]
) -> None:
    def shapes(named: Mapping[str, Mapping[str, Tensor]]) -> dict[str, tuple[int, ...]]:
        return {
            f"{name}/{kind}": tuple(tensor.shape)
            for name, tensors in named.items()
            for kind, tensor in tensors.items()
        }

    own_shapes, given_shapes = shapes(own), shapes(given)
    wrong = [
        f"{key}: {given_shapes.get(key, 'missing')} for {own_shapes.get(key, 'none')}"
        for key in sorted(own_shapes.keys() | given_shapes.keys())
        if own_shapes.get(key) != given_shapes.get(key)
    ]
    if wrong:
        more = len(wrong) - _NAMES_SHOWN
        raise CheckpointError(
            "the checkpoint's optimizer state is not of this model, optimizer and precision",
            found="; ".join(wrong[:_NAMES_SHOWN]) + (f"; {more} more" if more > 0 else ""),
            fix="use the --optimizer and precision flags of the run that saved it, or "
            "--no-load-optim to start with fresh state",
        )
